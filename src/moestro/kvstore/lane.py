"""A thread that does one store's blocking calls in order, behind futures that never outlive their
timeout.

Two threads a lane: the worker, which may be stuck in a call for as long as the store likes, and
the watchdog, which never touches the store and fails what is late. Whoever answers a job first,
answers it; the other's answer is thrown away.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from moestro.core.background import lower_priority
from moestro.core.page_moves import MoveFailure
from moestro.core.page_store import StoreError
from moestro.kvstore.backend import Deadline
from moestro.kvstore.breaker import CircuitBreaker

logger = logging.getLogger(__name__)
T = TypeVar("T")
Work = Callable[[Deadline], Any]

MAX_JOBS = 256


class _Job:
    """A call on its way; `finish` and `fail` say whether they came first.

    Once done it holds neither payloads nor results: the watchdog lets go of it only later.
    """

    def __init__(self, work: Work, num_bytes: int, timeout_s: float) -> None:
        self.future: Future[Any] | None = Future()
        self.future.set_running_or_notify_cancel()  # from here on only this class ends it
        self.work: Work | None = work
        self.num_bytes = num_bytes
        self.deadline = Deadline(timeout_s)
        self._lock = threading.Lock()

    @property
    def is_done(self) -> bool:
        return self.future is None

    def finish(self, result: Any) -> bool:
        future = self._take()
        if future is not None:
            future.set_result(result)
        return future is not None

    def fail(self, error: StoreError) -> bool:
        future = self._take()
        if future is not None:
            # Its payloads are the owner's again: the worker may still read them, but what it has
            # read must not count.
            self.deadline.end()
            future.set_exception(error)
        return future is not None

    def _take(self) -> "Future[Any] | None":
        with self._lock:
            future, self.future, self.work = self.future, None, None
            return future


class Lane:
    """Runs jobs one after another, and `upkeep` every `upkeep_s` between them."""

    def __init__(
        self,
        name: str,
        breaker: CircuitBreaker,
        *,
        timeout_s: float,
        max_bytes: int,
        upkeep: Callable[[], None],
        upkeep_s: float,
        gives_way: bool = False,
    ) -> None:
        """gives_way: what it does can wait for the rest of the process."""
        self._name = name
        self._gives_way = gives_way
        self._breaker = breaker
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._upkeep, self._upkeep_s = upkeep, upkeep_s
        self._upkeep_at = time.monotonic() + upkeep_s
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        # The watchdog's own: not woken for each job, which would take a core from the model.
        self._watching = threading.Condition(lock)
        self._waiting: deque[_Job] = deque()
        self._watched: deque[_Job] = deque()  # deadlines ascend: every job has the same timeout
        self._current: _Job | None = None
        self._busy_since: float | None = None
        self._num_bytes = 0
        self._last_reason: str | None = None
        self._closing = False
        self._at_end: Callable[[], None] | None = None
        self._worker = threading.Thread(target=self._work, name=f"{name} store", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name=f"{name} watch", daemon=True)
        self._worker.start()
        self._watchdog.start()

    @property
    def breaker_state(self) -> str:
        """closed, open or half_open."""
        with self._changed:
            return self._breaker.state

    def submit(self, work: "Callable[[Deadline], T]", num_bytes: int = 0) -> "Future[T]":
        """A future that is done within the timeout. Refused at once (unavailable) while the
        breaker is open or when too much is waiting.
        """
        job = _Job(work, num_bytes, self._timeout_s)
        future = job.future
        assert future is not None
        with self._changed:
            refusal = self._refusal(num_bytes)
            if refusal is None:
                self._num_bytes += num_bytes
                self._waiting.append(job)
                if not self._watched:
                    self._watching.notify()
                self._watched.append(job)
                self._changed.notify()
        if refusal is not None:
            job.fail(refusal)
        return future

    def _refusal(self, num_bytes: int) -> StoreError | None:
        if self._closing:
            return StoreError(MoveFailure.CANCELLED, "the store is closed")
        is_full = self._waiting and self._num_bytes + num_bytes > self._max_bytes
        if is_full or len(self._waiting) >= MAX_JOBS:
            text = f"{len(self._waiting)} calls of {self._num_bytes:,} bytes are waiting"
            return StoreError(MoveFailure.UNAVAILABLE, f"the store is behind: {text}")
        if not self._breaker.allow():
            text = f"the store failed and is left alone for {self._breaker.retry_after_s:.1f} s"
            return StoreError(MoveFailure.UNAVAILABLE, text)
        return None

    def close(self, timeout_s: float, at_end: Callable[[], None]) -> bool:
        """Do what is waiting, for at most so long, then call `at_end` in the worker; whether it
        came to that. What is left is cancelled."""
        with self._changed:
            self._closing, self._at_end = True, at_end
            self._changed.notify()
        self._worker.join(timeout_s)
        with self._changed:
            left = list(self._waiting)
            self._waiting.clear()
            if self._current is not None:
                left.append(self._current)
            self._watching.notify()
        for job in left:
            job.fail(StoreError(MoveFailure.CANCELLED, "the store was closed before this was done"))
        return not self._worker.is_alive()

    def _work(self) -> None:
        if self._gives_way:
            lower_priority()
        while self._wait():
            if time.monotonic() >= self._upkeep_at:
                self._quietly(self._upkeep)
                self._upkeep_at = time.monotonic() + self._upkeep_s
            with self._changed:
                job = self._current = self._waiting.popleft() if self._waiting else None
            work = job.work if job is not None else None
            if job is not None and work is not None:
                self._run(job, work)
            del work
            with self._changed:
                self._current = self._busy_since = None
                self._num_bytes -= job.num_bytes if job is not None else 0
        if self._at_end is not None:
            self._quietly(self._at_end)

    def _wait(self) -> bool:
        """Until there is a job or upkeep is due; False when the lane is closed and empty."""
        with self._changed:
            due_s = max(0.0, self._upkeep_at - time.monotonic())
            self._changed.wait_for(lambda: self._waiting or self._closing, due_s)
            self._busy_since = time.monotonic()
            return bool(self._waiting) or not self._closing

    def _quietly(self, action: Callable[[], None]) -> None:
        """Without raising; a reason is logged when it is new, not every few seconds."""
        reason = None
        try:
            action()
        except Exception as error:
            reason = str(error)
            if reason != self._last_reason:
                logger.warning("%s: %s", self._name, reason)
        self._last_reason = reason

    def _run(self, job: _Job, work: Work) -> None:
        try:
            result = work(job.deadline)
        except StoreError as error:
            if job.fail(error):
                self._report(error)
        except Exception as error:
            # A fault of this program or of a client library: the tier must not take the engine
            # down, and whoever reads the log must see where it was.
            logger.exception("%s: unexpected error", self._name)
            failure = StoreError(MoveFailure.ERROR, f"{type(error).__name__}: {error}")
            if job.fail(failure):
                self._report(failure)
        else:
            if job.finish(result):
                self._report(None)

    def _report(self, error: StoreError | None) -> None:
        with self._changed:
            before = self._breaker.state
            if error is None:
                self._breaker.succeeded()
            else:
                self._breaker.failed()
            after = self._breaker.state
        if before != after:
            reason = f": {error}" if error is not None else ""
            logger.warning("%s: circuit breaker %s%s", self._name, after, reason)

    def _watch(self) -> None:
        while True:
            with self._changed:
                while self._watched and self._watched[0].is_done:
                    self._watched.popleft()
                if not self._watched:
                    if self._closing:
                        return
                    self._watching.wait()
                    continue
                job = self._watched[0]
                if job.deadline.remaining_s:
                    self._watching.wait(job.deadline.remaining_s)
                    continue
                self._watched.popleft()
            self._expire(job)

    def _expire(self, job: _Job) -> None:
        error = StoreError(
            MoveFailure.TIMEOUT, f"the store did not answer within {self._timeout_s:g} s"
        )
        if not job.fail(error):
            return
        with self._changed:
            # A call that waited behind others that were answered says nothing against the store.
            since = self._busy_since
            is_stuck = since is not None and time.monotonic() - since >= self._timeout_s / 2
            if not is_stuck:
                self._breaker.gave_up()
        if is_stuck:
            self._report(error)
