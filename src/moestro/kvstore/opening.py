"""From the text of --kv-store to a store."""

import importlib.util
import re
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from moestro.core.page_store import PageStore
from moestro.errors import ConfigError, shown
from moestro.kvstore.backend import BlockingStore, Deadline
from moestro.kvstore.threaded import ThreadedStore

SCHEMES = ("lmdb", "redis", "mooncake")
SYNCS = ("always", "batch")
FORMS = "lmdb://PATH, redis://HOST:PORT/DB or mooncake://MASTER:PORT"
# A new LMDB environment is checked from end to end before it is believed.
OPEN_S = 60.0


def open_store(
    url: str, *, digest: bytes, capacity_bytes: int, sync: str = "always", timeout_s: float = 2.0
) -> PageStore:
    """The pages of one namespace in the store at `url`. Blocks: opening may read the index.

    digest: 16 bytes over everything that changes KV values. capacity_bytes: budget of an LMDB
    store; the others have their server's. timeout_s: of every later call.
    Raises ConfigError when `url` can't be meant, StoreError when the store can't be used now.
    """
    backend = open_backend(url, capacity_bytes=capacity_bytes, sync=sync, timeout_s=timeout_s)
    return ThreadedStore(backend, digest, timeout_s=timeout_s, name=urlsplit(url).scheme)


def open_existing(url: str, timeout_s: float) -> BlockingStore:
    """The store at `url` as it is, all its namespaces, without threads: for tools. Raises as
    open_store does, and ConfigError where an LMDB store would be a new one."""
    parts = split_url(url)
    if parts.scheme != "lmdb":
        return open_backend(url, capacity_bytes=0, timeout_s=timeout_s)
    from moestro.kvstore.lmdb_environment import DATA_FILE
    from moestro.kvstore.lmdb_store import LmdbStore

    folder = lmdb_folder(parts)
    if not (folder / DATA_FILE).exists():
        raise ConfigError(f"{folder} holds no store: there is no file {DATA_FILE} in it.")
    return LmdbStore(folder, 0, "always", Deadline(OPEN_S))


def open_backend(
    url: str, *, capacity_bytes: int, sync: str = "always", timeout_s: float = 2.0
) -> BlockingStore:
    """The store at `url` with all its namespaces, without threads. Raises as open_store does."""
    if sync not in SYNCS:
        raise ConfigError(f"the store's sync is {shown(sync)}, but must be one of {SYNCS}.")
    if timeout_s <= 0:
        raise ConfigError(f"the store's timeout is {timeout_s} s, but must be above 0.")
    parts = split_url(url)
    if parts.scheme == "lmdb":
        from moestro.kvstore.lmdb_store import MIN_CAPACITY_BYTES, LmdbStore

        if capacity_bytes < MIN_CAPACITY_BYTES:
            raise ConfigError(
                f"kv_store_bytes is {capacity_bytes:,}, but an LMDB store needs at least "
                f"{MIN_CAPACITY_BYTES:,}."
            )
        return LmdbStore(lmdb_folder(parts), capacity_bytes, sync, Deadline(OPEN_S))
    if parts.scheme == "redis":
        _need("redis", extra="redis")
        from moestro.kvstore.redis_store import RedisStore

        return RedisStore(parts, timeout_s)
    _need("mooncake", extra="mooncake")
    from moestro.kvstore.mooncake_store import MooncakeStore

    return MooncakeStore(parts)


def _need(module: str, *, extra: str) -> None:
    """Raise ConfigError unless the client library is installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"kv_store needs the Python package {module}: pip install 'moestro[{extra}]'."
        )


def split_url(url: str) -> SplitResult:
    """The parts of a store's URL with a known scheme. Raises ConfigError."""
    scheme, mark, rest = url.partition("://")
    if not mark or scheme not in SCHEMES or not rest:
        raise ConfigError(f"kv_store is {_shown(url)}, but must be none, {FORMS}.")
    try:
        parts = urlsplit(url)
        _ = parts.port  # parsed when asked for
    except ValueError as error:
        raise ConfigError(f"kv_store is {_shown(url)}, no URL: {error}. Use {FORMS}.") from error
    return parts


def _shown(url: str) -> str:
    """Without the password."""
    return shown(re.sub(r"(//[^/@:]*):[^/@]*@", r"\1:***@", url))


def lmdb_folder(parts: SplitResult) -> Path:
    """lmdb:///absolute/folder, lmdb://relative/folder, lmdb://~/folder."""
    if parts.query or parts.fragment:
        raise ConfigError(
            f"kv_store is {shown(parts.geturl())}: ? and # mean nothing in a path; "
            "write %3F and %23 if the folder is called so."
        )
    return Path(unquote(parts.netloc + parts.path)).expanduser()
