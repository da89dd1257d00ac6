"""SlowStore: a KV store that a benchmark slows down."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from moestro.core.page_moves import MoveFailure
from moestro.core.page_store import PageStore, Payload, StoreUsage


class SlowStore:
    """Another store whose reads come at bytes_per_s, and whose every call takes call_s more."""

    def __init__(self, store: PageStore, bytes_per_s: float = 0.0, call_s: float = 0.0) -> None:
        self._store = store
        self.bytes_per_s = bytes_per_s
        self._call_s = call_s
        self._pool = ThreadPoolExecutor(1)

    def get_many(self, keys: Sequence[bytes]) -> "Future[list[Payload | MoveFailure]]":
        def read() -> list[Payload | MoveFailure]:
            begin = time.perf_counter()
            found = self._store.get_many(keys).result()
            size = sum(memoryview(p).nbytes for p in found if not isinstance(p, MoveFailure))
            due_s = self._call_s + (size / self.bytes_per_s if self.bytes_per_s else 0.0)
            time.sleep(max(0.0, due_s - (time.perf_counter() - begin)))
            return found

        return self._pool.submit(read)

    def put_many(self, pages: Sequence[tuple[bytes, Payload]]) -> "Future[int]":
        return self._late(lambda: self._store.put_many(pages).result())

    def exists_many(self, keys: Sequence[bytes]) -> "Future[list[bool]]":
        return self._late(lambda: self._store.exists_many(keys).result())

    def delete(self, keys: Sequence[bytes]) -> "Future[int]":
        return self._store.delete(keys)

    def scan(self) -> Iterator[bytes]:
        return self._store.scan()

    def usage(self) -> StoreUsage:
        return self._store.usage()

    def close(self, timeout_s: float) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._store.close(timeout_s)

    def _late(self, work: Callable[[], Any]) -> "Future[Any]":
        if not self._call_s:
            return self._pool.submit(work)
        return self._pool.submit(lambda: (time.sleep(self._call_s), work())[1])
