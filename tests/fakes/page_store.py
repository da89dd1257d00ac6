"""A PageStore in memory whose every call a test can hold up or spoil."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from moestro.core.page_moves import MoveFailure
from moestro.core.page_store import Payload, StoreError, StoreUsage


class MemoryStore:
    """pages: what is stored. held: while set, calls are answered only by release().

    fail_next: failures that the next calls as a whole end with. capacity: pages, then full.
    spoil: keys that read as corrupt.
    """

    def __init__(self, capacity: int = 1 << 30) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.capacity = capacity
        self.spoil: set[bytes] = set()
        self.fail_next: list[MoveFailure] = []
        self.held = False
        self.calls: list[str] = []
        self.closed = False
        self._waiting: list[tuple[Future[Any], Any]] = []
        self._lock = threading.Lock()
        self.called = threading.Semaphore(0)

    def get_many(self, keys: Sequence[bytes]) -> "Future[list[Payload | MoveFailure]]":
        return self._answer("get", lambda: [self._get(key) for key in keys])

    def put_many(self, pages: Sequence[tuple[bytes, Payload]]) -> "Future[int]":
        return self._answer("put", lambda: self._put(pages))

    def exists_many(self, keys: Sequence[bytes]) -> "Future[list[bool]]":
        return self._answer("exists", lambda: [key in self.pages for key in keys])

    def delete(self, keys: Sequence[bytes]) -> "Future[int]":
        return self._answer(
            "delete", lambda: sum(self.pages.pop(k, None) is not None for k in keys)
        )

    def scan(self) -> Iterator[bytes]:
        return iter(tuple(self.pages))

    def usage(self) -> StoreUsage:
        return StoreUsage(sum(map(len, self.pages.values())), len(self.pages), 10**9, "closed")

    def close(self, timeout_s: float) -> None:
        self.closed = True

    def release(self) -> None:
        """Answer what was held up, and from now on at once."""
        with self._lock:
            self.held = False
            waiting, self._waiting = self._waiting, []
        for future, work in waiting:
            _resolve(future, work)

    def _answer(self, name: str, work: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        with self._lock:
            self.calls.append(name)
            if self.fail_next:
                failure = self.fail_next.pop(0)
                future.set_exception(StoreError(failure, "as the test wished"))
                return future
            if self.held:
                self._waiting.append((future, work))
                self.called.release()
                return future
        _resolve(future, work)
        return future

    def _get(self, key: bytes) -> Payload | MoveFailure:
        if key in self.spoil:
            return MoveFailure.CORRUPT
        return self.pages.get(key, MoveFailure.MISSING)

    def _put(self, pages: Sequence[tuple[bytes, Payload]]) -> int:
        for count, (key, payload) in enumerate(pages):
            if len(self.pages) >= self.capacity and key not in self.pages:
                return count
            self.pages[key] = bytes(payload)
        return len(pages)


def _resolve(future: "Future[Any]", work: Any) -> None:
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
