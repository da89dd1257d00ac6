"""PageTransfer: the PageMover that moves bytes between the KV pool, host memory and a store."""

import logging
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from moestro.core.background import lower_priority
from moestro.core.page_moves import Move, MoveFailure, MoveKind, MoveResult, MoverState
from moestro.core.page_store import PageStore, StoreUsage
from moestro.runner import move_jobs
from moestro.runner.byte_budget import ByteBudget
from moestro.runner.host_pool import HostPool
from moestro.runner.move_jobs import Job

logger = logging.getLogger(__name__)

FLUSH_S = 7.0
"""Pending puts have so long when the engine closes, the process ends or the mover is dropped: the
engine's own wait comes before it, 10 s in all."""
_MAX_MOVES = 8192
_JOIN_S = 5.0
_USAGE_AGE_S = 1.0
_READS = (MoveKind.FETCH, MoveKind.LOOKUP)
_WRITES = (MoveKind.PUT, MoveKind.DELETE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """background_bytes_per_s: of moves that nobody waits for; 0 is no limit. max_queued_bytes:
    accepted and not yet moved, of the urgent moves and of the others. call_timeout_s: after which
    an answer of the store is no longer awaited."""

    background_bytes_per_s: int = 0
    max_queued_bytes: int = 1 << 28
    call_timeout_s: float = 10.0


class PageTransfer:
    """Two threads: one for urgent moves, one, of low priority and on a byte budget, for the rest.

    They never wait for the store: a call of it that hangs holds up its own move and no other. The
    threads end with close, or flush and end when this is dropped or the process exits.
    """

    def __init__(
        self,
        host: HostPool,
        limits: TransferLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.page_bytes = host.page_bytes
        self._work = work = _Work(host, limits, clock)
        self._stop = weakref.finalize(self, _close_apart, work)
        work.start()

    @property
    def has_store(self) -> bool:
        """See PageMover."""
        return self._work.store is not None

    def attach(self, store: PageStore) -> None:
        """Use this store from now on, and close it at the end. For any thread, once."""
        self._work.attach(store)

    def note_unusable(self, failure: MoveFailure) -> None:
        """A store that was asked for can't be opened: state() tells, until one is attached."""
        self._work.note_unusable(failure)

    def submit(self, move: Move) -> bool:
        """See PageMover. Raises ValueError for a move whose parts don't match its kind."""
        return self._work.submit(move)

    def cancel(self, move_id: int) -> None:
        """See PageMover. Unknown ids are ignored."""
        self._work.cancel(move_id)

    def poll(self) -> Sequence[MoveResult]:
        """See PageMover."""
        return self._work.poll()

    def wait(self, timeout_s: float) -> None:
        """See PageMover."""
        self._work.wait(timeout_s)

    def state(self) -> MoverState:
        """See PageMover."""
        return self._work.state()

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """See PageMover. Look at uses_pools before giving their memory back."""
        self._stop.detach()
        self._work.close(timeout_s)

    @property
    def uses_pools(self) -> bool:
        """Whether a thread reads or writes pages now; after close, whether one is stuck there."""
        return bool(self._work.moving())


class _Lane:
    """Jobs that can go on now, and what the lane has accepted."""

    def __init__(self, urgent: bool, lock: threading.Lock) -> None:
        self.urgent = urgent
        # of its own: a piece moved in the background must not wake the urgent thread, which would
        # take a core from the model
        self.changed = threading.Condition(lock)
        self.ready: deque[Job] = deque()
        self.num_bytes = 0
        self.current: Job | None = None  # whose pages the lane's thread reads or writes


class _Work:
    """What the threads share. It holds no reference to the PageTransfer, so that can be dropped."""

    def __init__(self, host: HostPool, limits: TransferLimits, clock: Callable[[], float]) -> None:
        self.store: PageStore | None = None
        self._host = host
        self._limits = limits
        self._clock = clock
        self._budget = ByteBudget(limits.background_bytes_per_s, clock)
        self._meter = move_jobs.ReadMeter()
        self._lock = threading.Lock()
        self._finished = threading.Condition(self._lock)
        self._flushing = threading.Event()
        self._stopped = False
        self._is_unusable = False
        self._jobs: dict[int, Job] = {}
        self._results: deque[MoveResult] = deque()
        self._failures: Counter[str] = Counter()
        self._usage: tuple[float, StoreUsage] | None = None
        self._lanes = {urgent: _Lane(urgent, self._lock) for urgent in (True, False)}
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(lane,),
                name="moestro-kv-" + ("urgent" if lane.urgent else "background"),
                daemon=True,
            )
            for lane in self._lanes.values()
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def attach(self, store: PageStore) -> None:
        with self._lock:
            if not self._flushing.is_set():
                self.store = store
                return
        store.close(0.0)

    def note_unusable(self, failure: MoveFailure) -> None:
        with self._lock:
            self._is_unusable = True
            self._failures[str(failure)] += 1

    def submit(self, move: Move) -> bool:
        move_jobs.check_move(move)
        if move.move_id in self._jobs:
            raise ValueError(f"move {move.move_id} is under way already")
        store = self.store
        if move.kind is not MoveKind.SAVE and store is None:
            return False
        num_bytes = len(move.slots) * self._host.page_bytes
        job = Job(move, num_bytes)
        with self._lock:
            lane = self._lanes[move.urgent]
            full = lane.num_bytes and lane.num_bytes + num_bytes > self._limits.max_queued_bytes
            if self._flushing.is_set() or full or len(self._jobs) >= _MAX_MOVES:
                return False
            job.steps = self._steps(job, store)
            self._jobs[move.move_id] = job
            lane.num_bytes += num_bytes
            lane.ready.append(job)
            lane.changed.notify()
        return True

    def _steps(self, job: Job, store: PageStore | None) -> move_jobs.Steps:
        if job.move.kind is MoveKind.SAVE:
            return move_jobs.save(job, self._host)
        assert store is not None
        if job.move.kind is MoveKind.LOOKUP:
            return move_jobs.lookup(job, store)
        if job.move.kind is MoveKind.DELETE:
            return move_jobs.delete(job, store)
        if job.move.kind is MoveKind.PUT:
            return move_jobs.put(job, self._host, store)
        return move_jobs.fetch(job, self._host, store, self._meter)

    def cancel(self, move_id: int) -> None:
        with self._lock:
            job = self._jobs.get(move_id)
            if job is not None:
                self._cancel(job)

    def _cancel(self, job: Job) -> None:
        """With the lock held. What waits for the store waits no more, unless it lends it slots."""
        job.cancelled = True
        if job.parked is not None and job.move.kind in _READS:
            self._finish(job)

    def poll(self) -> Sequence[MoveResult]:
        if not self._results:
            return ()
        with self._lock:
            found = tuple(self._results)
            self._results.clear()
        return found

    def wait(self, timeout_s: float) -> None:
        with self._finished:
            self._finished.wait_for(lambda: self._results or self._stopped, timeout_s)

    def state(self) -> MoverState:
        usage = self._store_usage()
        with self._lock:
            queued = sum(job.num_bytes - job.num_moved_bytes for job in self._jobs.values())
            failures = tuple(sorted(self._failures.items()))
        if usage is None:
            breaker = "open" if self._is_unusable else "none"
            return MoverState(num_queued_bytes=queued, breaker=breaker, failures=failures)
        return MoverState(
            num_queued_bytes=queued,
            store_bytes=usage.bytes_used or 0,
            store_capacity_bytes=usage.capacity_bytes,
            breaker=usage.breaker,
            num_quarantined=usage.num_quarantined,
            num_store_evicted=usage.num_evicted,
            failures=failures,
        )

    def _store_usage(self) -> StoreUsage | None:
        """At most a second old, and younger than what this mover wrote last."""
        store, now, known = self.store, self._clock(), self._usage
        if store is None:
            return None
        if known is None or now - known[0] > _USAGE_AGE_S:
            self._usage = known = now, store.usage()
        return known[1]

    def close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            if self._stopped:
                return
            self._flushing.set()  # nothing more is accepted, and the budget no longer counts
            for job in list(self._jobs.values()):
                if job.move.kind not in _WRITES:
                    self._cancel(job)
            self._wake()
            self._finished.wait_for(lambda: not self._puts(), max(0.0, deadline - time.monotonic()))
            unwritten = sum(j.num_bytes - j.num_moved_bytes for j in self._puts())
            self._stopped = True
            self._wake()
            self._finished.notify_all()
        if unwritten:
            logger.warning("%s bytes of KV were not stored before the end", f"{unwritten:,}")
        self._let_go(deadline)

    def _let_go(self, deadline: float) -> None:
        """Of the threads, the store and the pool, unless a thread is stuck in its pages."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
        with self._lock:
            moving = self.moving()
            for job in list(self._jobs.values()):
                job.cancelled = True
                if job not in moving:  # its thread ends it, after its last touch of a page
                    self._finish(job)
        if self.store is not None:
            self.store.close(max(0.0, deadline - time.monotonic()))
        if moving:
            # a page is never freed under a move: what the thread holds goes when it does
            kinds = ", ".join(sorted(job.move.kind for job in moving))
            logger.error("a move of KV pages (%s) does not end: their memory is kept", kinds)
        else:
            self._host.close()

    def moving(self) -> list[Job]:
        """Whose pages threads read or write."""
        return [lane.current for lane in self._lanes.values() if lane.current is not None]

    def _wake(self) -> None:
        """All threads. With the lock held."""
        for lane in self._lanes.values():
            lane.changed.notify()

    def _puts(self) -> list[Job]:
        return [job for job in self._jobs.values() if job.move.kind in _WRITES]

    # The threads' own part.

    def _run(self, lane: _Lane) -> None:
        if not lane.urgent:
            lower_priority()
        while (job := self._next(lane)) is not None:
            self._advance(job, lane)
            del job

    def _next(self, lane: _Lane) -> Job | None:
        """The lane's next job that can go on; None when the work is over."""
        with lane.changed:
            while not self._stopped:
                timeout_s = self._expire() if lane.urgent else None
                if lane.ready:
                    lane.current = lane.ready.popleft()
                    return lane.current
                lane.changed.wait(timeout_s)
        return None

    def _expire(self) -> float | None:
        """Give up reads whose answer is overdue; seconds until the next one may be."""
        now, soonest = self._clock(), None
        for job in list(self._jobs.values()):
            if job.parked is None or job.move.kind not in _READS:
                continue
            left_s = job.parked_until - now
            if left_s <= 0:
                job.failure = MoveFailure.TIMEOUT
                self._finish(job)
            elif soonest is None or left_s < soonest:
                soonest = left_s
        return soonest

    def _advance(self, job: Job, lane: _Lane) -> None:
        """One step. Nothing escapes: a failure is the job's."""
        step: int | Future[Any] | None = None
        try:
            job.begin()
            step = next(job.steps, None)
            if isinstance(step, int) and not lane.urgent and not job.cancelled:
                self._flushing.wait(self._budget.take(step))
        except BaseException as error:
            job.fail(error)
            step = None
        with self._lock:
            lane.current = None
            if step is None or self._stopped:
                self._finish(job)
            elif not isinstance(step, int):
                job.parked, job.parked_until = step, self._clock() + self._limits.call_timeout_s
                if not lane.urgent and job.move.kind in _READS:
                    self._lanes[True].changed.notify()  # it watches over the timeouts of all reads
            elif lane.urgent:
                lane.ready.append(job)
            else:
                lane.ready.appendleft(job)  # one after the other, so that some are done early
        if step is not None and not isinstance(step, int):
            if job.cancelled:
                with self._lock:
                    self._cancel(job)
            step.add_done_callback(lambda done: self._unpark(job, lane, done))

    def _unpark(self, job: Job, lane: _Lane, future: "Future[Any]") -> None:
        with self._lock:
            if job.parked is future and job.move.move_id in self._jobs:
                job.parked = None
                lane.ready.append(job) if lane.urgent else lane.ready.appendleft(job)
                lane.changed.notify()

    def _finish(self, job: Job) -> None:
        """With the lock held."""
        if self._jobs.pop(job.move.move_id, None) is None:
            return
        job.parked = None
        self._lanes[job.move.urgent].num_bytes -= job.num_bytes
        result = job.result()
        if result.failure not in (None, MoveFailure.MISSING, MoveFailure.CANCELLED):
            self._failures[str(result.failure)] += 1
        if job.move.kind in _WRITES:
            self._usage = None
        self._results.append(result)
        self._finished.notify_all()


def _close_apart(work: _Work) -> None:
    """Flush and end when the mover was dropped or the process exits.

    The collector may call this in any thread, one that holds the lock among them; only the main
    thread, which never does, waits.
    """
    thread = threading.Thread(target=work.close, args=(FLUSH_S,), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter takes no new thread any more
        work.close(FLUSH_S)
        return
    if threading.current_thread() is threading.main_thread():
        thread.join(FLUSH_S + _JOIN_S)
