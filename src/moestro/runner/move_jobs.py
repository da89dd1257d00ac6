"""What a mover does for each kind of move, in pieces: generators that never wait themselves.

A job yields the number of bytes it is about to move, and goes on when its thread may spend them;
or a Future of the store, and goes on when that is done. It ends by returning.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, TypeAlias

from moestro.core.page_moves import Move, MoveFailure, MoveKind, MoveResult
from moestro.core.page_store import PageStore, StoreError
from moestro.runner.host_pool import HostPool

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
"""What is moved between two looks at cancellations, the budget and other moves."""
_AHEAD = 2
"""Calls of the store that one move keeps under way."""
_LOOKUP_KEYS = 1024

Steps: TypeAlias = Iterator["int | Future[Any]"]


class Job:
    """A move under way. Whoever runs it holds it alone; cancelled may be set by anyone."""

    def __init__(self, move: Move, num_bytes: int) -> None:
        self.move = move
        self.num_bytes = num_bytes  # in all
        self.num_moved_bytes = 0
        self.num_done = 0
        self.failure: MoveFailure | None = None
        self.cancelled = False
        self.parked: Future[Any] | None = None
        self.parked_until = 0.0
        self.steps: Steps = iter(())
        self.store_s = 0.0  # that the store spent on this move alone
        self._began: float | None = None

    def is_cancelled(self) -> bool:
        """As of now: another thread may say so at any time."""
        return self.cancelled

    def begin(self) -> None:
        """Note the time, once."""
        if self._began is None:
            self._began = time.perf_counter()

    def result(self) -> MoveResult:
        """As of now."""
        failure = self.failure
        if failure is None and self.num_done < num_pages(self.move):
            failure = MoveFailure.CANCELLED if self.cancelled else MoveFailure.ERROR
        seconds = self.store_s
        if not seconds and self._began is not None:
            seconds = time.perf_counter() - self._began
        return MoveResult(self.move.move_id, self.num_done, self.num_moved_bytes, seconds, failure)

    def fail(self, error: BaseException) -> None:
        """Take the store's word for what went wrong, or log what should not have happened."""
        if isinstance(error, StoreError):
            self.failure = error.failure
            return
        logger.error("KV pages could not be moved (%s)", self.move.kind, exc_info=error)
        self.failure = MoveFailure.ERROR


class ReadMeter:
    """How long a store, which answers one call after the other, takes for each.

    Fetches under way at the same time would count each other's time: then the store would seem as
    many times slower as there are of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_done = 0.0

    def watch(self, job: Job, future: "Future[Any]") -> None:
        """Add to job.store_s what a call made just now will have taken."""
        called = time.perf_counter()

        def note(_done: object) -> None:
            now = time.perf_counter()
            with self._lock:
                job.store_s += now - max(called, self._last_done)
                self._last_done = now

        future.add_done_callback(note)


def num_pages(move: Move) -> int:
    """How many pages a move is about."""
    return max(len(move.keys), len(move.slots))


def check_move(move: Move) -> None:
    """Raises ValueError for a move whose parts don't match its kind."""
    lengths = {
        MoveKind.SAVE: (len(move.pages), len(move.slots)),
        MoveKind.PUT: (len(move.slots), len(move.keys)),
        MoveKind.FETCH: (len(move.keys), len(move.slots)),
        MoveKind.LOOKUP: (len(move.keys), len(move.keys)),
        MoveKind.DELETE: (len(move.keys), len(move.keys)),
    }[move.kind]
    if lengths[0] != lengths[1]:
        raise ValueError(f"a {move.kind} of {lengths[0]} and {lengths[1]} pages")


def save(job: Job, host: HostPool) -> Steps:
    """Device pages to slots, part of a page at a time where a page is large."""
    pages, slots, layers = job.move.pages, job.move.slots, host.layout.num_layers
    per_piece = max(1, PIECE_BYTES // host.page_bytes)
    layers_per_piece = max(1, PIECE_BYTES // host.layout.layer_bytes)
    for begin in range(0, len(slots), per_piece):
        at = slice(begin, begin + per_piece)
        for first in range(0, layers, layers_per_piece):
            some = range(first, min(first + layers_per_piece, layers))
            num_bytes = len(some) * host.layout.layer_bytes * len(slots[at])
            yield num_bytes
            if job.is_cancelled():
                return
            host.save(some, pages[at], slots[at])
            job.num_moved_bytes += num_bytes
        job.num_done += len(slots[at])


def put(job: Job, host: HostPool, store: PageStore) -> Steps:
    """Slots into the store."""
    move = job.move

    def start(at: slice) -> "Future[int]":
        return store.put_many(
            [
                (key, host.payload(slot))
                for key, slot in zip(move.keys[at], move.slots[at], strict=True)
            ]
        )

    def take(at: slice, count: int) -> bool:
        whole = len(move.slots[at])
        job.num_done += min(count, whole)
        job.num_moved_bytes += min(count, whole) * host.page_bytes
        if count < whole:
            job.failure = MoveFailure.FULL
        return count >= whole

    # even a cancelled one awaits what the store is reading from the slots
    return _pipelined(job, host, start, take, must_await=True)


def fetch(job: Job, host: HostPool, store: PageStore, meter: ReadMeter) -> Steps:
    """From the store into slots."""
    move = job.move

    def start(at: slice) -> "Future[list[Any]]":
        future = store.get_many(move.keys[at])
        meter.watch(job, future)
        return future

    def take(at: slice, payloads: list[Any]) -> bool:
        for slot, payload in zip(move.slots[at], payloads, strict=True):
            if isinstance(payload, MoveFailure):
                job.failure = payload
                return False
            if memoryview(payload).nbytes != host.page_bytes:
                job.failure = MoveFailure.CORRUPT
                return False
            host.fill(slot, payload)
            job.num_done += 1
            job.num_moved_bytes += host.page_bytes
        return True

    return _pipelined(job, host, start, take, must_await=False)


def lookup(job: Job, store: PageStore) -> Steps:
    """How many keys from the first on are stored."""
    keys = job.move.keys
    for begin in range(0, len(keys), _LOOKUP_KEYS):
        if job.is_cancelled():
            return
        future = store.exists_many(keys[begin : begin + _LOOKUP_KEYS])
        yield future
        found = future.result()
        job.num_done += found.index(False) if False in found else len(found)
        if False in found:
            job.failure = MoveFailure.MISSING
            return


def delete(job: Job, store: PageStore) -> Steps:
    """Keys out of the store, those that aren't there too."""
    keys = job.move.keys
    for begin in range(0, len(keys), _LOOKUP_KEYS):
        if job.is_cancelled():
            return
        some = keys[begin : begin + _LOOKUP_KEYS]
        future = store.delete(some)
        yield future
        future.result()
        job.num_done += len(some)


def _pipelined(
    job: Job,
    host: HostPool,
    start: Callable[[slice], "Future[Any]"],
    take: Callable[[slice, Any], bool],
    *,
    must_await: bool,
) -> Steps:
    """Keep _AHEAD calls under way, take their results in order until `take` says no."""
    per_piece = max(1, PIECE_BYTES // host.page_bytes)
    pieces = deque(
        slice(begin, begin + per_piece) for begin in range(0, num_pages(job.move), per_piece)
    )
    ahead: deque[tuple[slice, Future[Any]]] = deque()
    going_on = True
    while ahead or (going_on and pieces):
        while going_on and pieces and len(ahead) < _AHEAD and not job.is_cancelled():
            yield len(job.move.slots[pieces[0]]) * host.page_bytes
            if job.is_cancelled():
                break
            at = pieces.popleft()
            try:
                ahead.append((at, start(at)))
            except Exception as refusal:
                job.fail(refusal)
                going_on = False
        going_on = going_on and not job.is_cancelled()
        if not ahead or not (going_on or must_await):
            return
        at, future = ahead.popleft()
        yield future
        error = _error_of(future)
        if error is not None and job.failure is None:
            job.fail(error)
        going_on = error is None and job.failure is None and take(at, future.result()) and going_on


def _error_of(future: "Future[Any]") -> BaseException | None:
    try:
        return future.exception()
    except CancelledError as error:
        return error
