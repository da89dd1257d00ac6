"""Each kind of store as a place that a test can open, spoil and open again."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.kvstore.memory_backend import MemoryBackend

from moestro.kvstore.backend import BlockingStore, Deadline
from moestro.kvstore.codec import join, split
from moestro.kvstore.opening import open_backend
from moestro.kvstore.threaded import ThreadedStore

DIGEST = bytes(range(16))
OTHER_DIGEST = bytes(range(16, 32))
CAPACITY_BYTES = 64 * 2**20
TIMEOUT_S = 20.0


class Place:
    """Where stores of one kind meet. Whatever was opened here is closed by `close`.

    lists: whether it can list its pages. holds_empty: whether a value may have no bytes.
    """

    def __init__(
        self, backend: Callable[[], BlockingStore], lists: bool = True, holds_empty: bool = True
    ) -> None:
        self.backend = backend
        self.lists, self.holds_empty = lists, holds_empty
        self._opened: list[ThreadedStore] = []

    def open(self, digest: bytes = DIGEST, timeout_s: float = TIMEOUT_S) -> ThreadedStore:
        store = ThreadedStore(self.backend(), digest, timeout_s=timeout_s)
        self._opened.append(store)
        return store

    @contextlib.contextmanager
    def raw(self) -> Iterator[BlockingStore]:
        """The backend itself, for what only a test does."""
        backend = self.backend()
        try:
            yield backend
        finally:
            backend.close()

    def spoil(self, key: bytes, change: Callable[[bytearray], None]) -> None:
        """Change the stored bytes of one page."""
        with self.raw() as backend:
            (value,) = backend.get_many([key], Deadline(TIMEOUT_S))
            assert value is not None
            changed = bytearray(join(value))
            change(changed)
            assert backend.delete([key], Deadline(TIMEOUT_S)) == 1
            assert backend.put_many([(key, split(changed))], Deadline(TIMEOUT_S)) == 1

    def close(self) -> None:
        for store in self._opened:
            store.close(10.0)


def memory_place() -> Place:
    values: dict[bytes, bytes] = {}
    return Place(lambda: MemoryBackend(values))


def lmdb_place(folder: Path, sync: str = "batch") -> Place:
    return Place(lambda: open_backend(f"lmdb://{folder}", capacity_bytes=CAPACITY_BYTES, sync=sync))


def redis_place(url: str) -> Place:
    return Place(lambda: open_backend(url, capacity_bytes=CAPACITY_BYTES))


def mooncake_place(url: str) -> Place:
    backend = lambda: open_backend(url, capacity_bytes=CAPACITY_BYTES)  # noqa: E731
    return Place(backend, lists=False, holds_empty=False)
