"""Page accounting: who holds which KV page and what is in it. No tensors here."""

from moestro.kvcache.manager import KVCacheManager, KVCacheStats

__all__ = ["KVCacheManager", "KVCacheStats"]
