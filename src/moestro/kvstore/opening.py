"""From the text of --kv-store to a store."""

import errno
import importlib.util
import logging
import mmap
import os
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from moestro.core.page_store import PageStore
from moestro.errors import ConfigError, shown
from moestro.kvstore.backend import BlockingStore, Deadline
from moestro.kvstore.store_url import database, lmdb_folder, split_url
from moestro.kvstore.threaded import ThreadedStore

logger = logging.getLogger(__name__)

SYNCS = ("always", "batch")
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
    if not timeout_s > 0:
        raise ConfigError(f"the store's timeout is {timeout_s} s, but must be above 0.")
    parts = split_url(url)
    if parts.scheme == "lmdb":
        from moestro.kvstore.lmdb_store import LmdbStore

        _check_budget(capacity_bytes)
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


def check_start(url: str, capacity_bytes: int) -> None:
    """What can be told before the store is opened, which may take long: a wrong URL, a budget
    that no map can have, a folder that can't be made or written. Makes the folder.

    Raises ConfigError. A disk that is full now, or smaller than the budget, is a warning: the
    engine can serve on one.
    """
    parts = split_url(url)
    if parts.scheme == "redis":
        database(parts)
    if parts.scheme != "lmdb":
        _need(parts.scheme, extra=parts.scheme)
        return
    folder = lmdb_folder(parts)
    _check_budget(capacity_bytes)
    try:
        there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            what = "is no folder" if not there.is_dir() else "can't be written"
            raise ConfigError(
                f"kv_store={shown(url)}: {there} {what}. Give a folder that this user may write to."
            )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _warn_of_small_disk(folder, capacity_bytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return  # tried again while the engine serves
        raise ConfigError(
            f"kv_store={shown(url)}: {shown(str(folder))} can't be made a folder: "
            f"{error.strerror}. Give a folder that this user may write to."
        ) from None


def _check_budget(num_bytes: int) -> None:
    """Raise ConfigError unless LMDB can map so much: at once, not as the store grows."""
    from moestro.kvstore.lmdb_store import MIN_CAPACITY_BYTES

    if num_bytes < MIN_CAPACITY_BYTES:
        raise ConfigError(
            f"kv_store_bytes is {num_bytes:,}, but an LMDB store needs at least "
            f"{MIN_CAPACITY_BYTES:,}."
        )
    if not _has_addresses(num_bytes):
        fits = next(2**i for i in range(num_bytes.bit_length() - 1, -1, -1) if _has_addresses(2**i))
        raise ConfigError(
            f"kv_store_bytes is {num_bytes:,}, but an LMDB store is mapped as a whole, and this "
            f"process has addresses for no more than {fits:,} to {2 * fits:,} bytes. Give less."
        )


def _has_addresses(num_bytes: int) -> bool:
    """Whether so much could be mapped now. Takes addresses for a moment, and no memory."""
    try:
        mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE, prot=0).close()
    except (OSError, OverflowError):
        return False
    return True


def _warn_of_small_disk(folder: Path, capacity_bytes: int) -> None:
    from moestro.kvstore.lmdb_environment import DATA_FILE

    data = folder / DATA_FILE
    taken = data.stat().st_blocks * 512 if data.exists() else 0
    room = shutil.disk_usage(folder).free + taken
    if room < capacity_bytes:
        logger.warning(
            "kv_store_bytes is %s, but the disk of %s has room for %s: when it is full, pages are "
            "evicted or not stored",
            f"{capacity_bytes:,}",
            folder,
            f"{room:,}",
        )
