"""Stores for KV pages: LMDB (embedded, the default), Redis, Mooncake. docs/kv-store.md."""

from moestro.kvstore.opening import open_store

__all__ = ["open_store"]
