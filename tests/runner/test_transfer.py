"""PageTransfer: every move's bytes and result, whatever the store does meanwhile."""

import gc
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from tests.fakes.page_store import MemoryStore
from tests.runner.test_host_pool import filled_pool, parts

from moestro.core.page_moves import Move, MoveFailure, MoveKind, MoveResult
from moestro.runner.host_pool import HostPool
from moestro.runner.kv_pool import KVPool
from moestro.runner.kv_tiers import KVTiers
from moestro.runner.move_jobs import Job, ReadMeter
from moestro.runner.page_loader import PageLoader
from moestro.runner.transfer import PageTransfer, TransferLimits

LONG_S = 30.0
NUM_SLOTS = 8


class Rig:
    """A mover over random pages, and the store behind it."""

    def __init__(self, store: MemoryStore | None = None, **limits: float) -> None:
        self.pool: KVPool = filled_pool(torch.bfloat16, num_pages=10)
        self.host = HostPool(self.pool, NUM_SLOTS)
        self.mover = PageTransfer(self.host, TransferLimits(**limits))  # type: ignore[arg-type]
        self.store = store
        if store is not None:
            self.mover.attach(store)
        self._ids = iter(range(10**6))

    def submit(self, kind: MoveKind, **fields: object) -> int:
        move_id = next(self._ids)
        assert self.mover.submit(Move(move_id, kind, **fields))  # type: ignore[arg-type]
        return move_id

    def result(self) -> MoveResult:
        """The next one; a test that is alone gets its own."""
        self.mover.wait(LONG_S)
        (found,) = self.mover.poll()
        return found

    def do(self, kind: MoveKind, **fields: object) -> MoveResult:
        move_id = self.submit(kind, **fields)
        found = self.result()
        assert found.move_id == move_id
        return found

    def page(self, number: int) -> bytes:
        """A device page in the canonical layout."""
        return b"".join(
            bytes(part[number, head].flatten().tolist())
            for pages in self.pool.layers
            for head in range(pages.num_kv_heads)
            for part in parts(pages)
        )


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def rig(store: MemoryStore) -> Iterator[Rig]:
    made = Rig(store)
    yield made
    store.release()
    made.mover.close(1.0)


KEYS = tuple(bytes([i]) * 16 for i in range(NUM_SLOTS))


@pytest.mark.parametrize("urgent", [False, True])
def test_pages_go_to_the_store_and_back(rig: Rig, store: MemoryStore, urgent: bool):
    saved = rig.do(MoveKind.SAVE, pages=(3, 7, 4), slots=(0, 5, 1), urgent=urgent)
    assert (saved.num_done, saved.failure) == (3, None)
    assert saved.num_bytes == 3 * rig.mover.page_bytes
    assert saved.seconds > 0
    put = rig.do(MoveKind.PUT, slots=(0, 5, 1), keys=KEYS[:3], urgent=urgent)
    assert (put.num_done, put.num_bytes, put.failure) == (3, saved.num_bytes, None)
    assert store.pages == {KEYS[0]: rig.page(3), KEYS[1]: rig.page(7), KEYS[2]: rig.page(4)}
    found = rig.do(MoveKind.LOOKUP, keys=KEYS[:4], urgent=urgent)
    assert (found.num_done, found.failure) == (3, MoveFailure.MISSING)
    fetched = rig.do(MoveKind.FETCH, keys=KEYS[:3], slots=(7, 6, 2), urgent=urgent)
    assert (fetched.num_done, fetched.num_bytes, fetched.failure) == (3, saved.num_bytes, None)
    assert [bytes(rig.host.payload(s)) for s in (7, 6, 2)] == [rig.page(n) for n in (3, 7, 4)]
    assert rig.mover.state().failures == ()


def test_large_pages_are_moved_in_pieces(store: MemoryStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("moestro.runner.move_jobs.PIECE_BYTES", 100)
    rig = Rig(store)
    rig.do(MoveKind.SAVE, pages=tuple(range(8)), slots=tuple(range(8)))
    rig.do(MoveKind.PUT, slots=tuple(range(8)), keys=KEYS)
    assert store.calls.count("put") == 8
    assert [store.pages[key] for key in KEYS] == [rig.page(n) for n in range(8)]
    fetched = rig.do(MoveKind.FETCH, keys=KEYS[::-1], slots=tuple(range(8)))
    assert fetched.num_done == 8
    assert bytes(rig.host.payload(0)) == rig.page(7)
    rig.mover.close(1.0)
    assert store.closed


def test_a_fetch_ends_at_the_first_page_that_is_not_whole(rig: Rig, store: MemoryStore):
    whole = b"\1" * rig.mover.page_bytes
    store.pages = {KEYS[0]: whole, KEYS[1]: whole, KEYS[2]: whole[:-1], KEYS[3]: whole}
    short = rig.do(MoveKind.FETCH, keys=KEYS[:4], slots=(0, 1, 2, 3))
    assert (short.num_done, short.failure) == (2, MoveFailure.CORRUPT)
    store.spoil.add(KEYS[0])
    spoilt = rig.do(MoveKind.FETCH, keys=KEYS[:2], slots=(0, 1))
    assert (spoilt.num_done, spoilt.failure) == (0, MoveFailure.CORRUPT)
    absent = rig.do(MoveKind.FETCH, keys=(KEYS[1], KEYS[7]), slots=(0, 1))
    assert (absent.num_done, absent.failure) == (1, MoveFailure.MISSING)
    assert dict(rig.mover.state().failures) == {"corrupt": 2}


@pytest.mark.parametrize("failure", [MoveFailure.UNAVAILABLE, MoveFailure.TIMEOUT])
@pytest.mark.parametrize("kind", [MoveKind.PUT, MoveKind.FETCH, MoveKind.LOOKUP, MoveKind.DELETE])
def test_a_failing_call_is_the_moves_failure(
    rig: Rig, store: MemoryStore, failure: MoveFailure, kind: MoveKind
):
    store.fail_next = [failure]
    slots = () if kind in (MoveKind.LOOKUP, MoveKind.DELETE) else (0, 1)
    result = rig.do(kind, keys=KEYS[:2], slots=slots)
    assert (result.num_done, result.failure) == (0, failure)
    assert dict(rig.mover.state().failures) == {str(failure): 1}
    assert rig.do(MoveKind.PUT, keys=KEYS[:2], slots=(0, 1)).failure is None


def test_a_full_store_takes_what_fits():
    rig = Rig(MemoryStore(capacity=2))
    result = rig.do(MoveKind.PUT, keys=KEYS[:4], slots=(0, 1, 2, 3))
    assert (result.num_done, result.failure) == (2, MoveFailure.FULL)
    rig.mover.close(1.0)


def test_what_a_store_should_not_do_is_logged_and_survived(
    rig: Rig, store: MemoryStore, caplog: pytest.LogCaptureFixture
):
    def broken(*_args: object) -> None:
        raise ZeroDivisionError("not a StoreError")

    good, store.get_many = store.get_many, broken  # type: ignore[method-assign,assignment]
    with caplog.at_level(logging.ERROR):
        result = rig.do(MoveKind.FETCH, keys=KEYS[:2], slots=(0, 1))
    assert (result.num_done, result.failure) == (0, MoveFailure.ERROR)
    assert "ZeroDivisionError" in caplog.text
    store.get_many = good  # type: ignore[method-assign]
    store.pages[KEYS[0]] = bytes(rig.mover.page_bytes)
    assert rig.do(MoveKind.FETCH, keys=KEYS[:1], slots=(0,)).num_done == 1


def test_a_call_that_hangs_holds_up_no_other_move(rig: Rig, store: MemoryStore):
    store.pages[KEYS[0]] = bytes(rig.mover.page_bytes)
    store.held = True
    for kind in (MoveKind.PUT, MoveKind.FETCH):
        for urgent in (False, True):
            rig.submit(kind, keys=KEYS[:1], slots=(0,), urgent=urgent)
    for _ in range(4):
        assert store.called.acquire(timeout=LONG_S)
    store.held = False
    for urgent in (False, True):
        assert rig.do(MoveKind.SAVE, pages=(1,), slots=(3,), urgent=urgent).num_done == 1
        assert rig.do(MoveKind.LOOKUP, keys=KEYS[:1], urgent=urgent).num_done == 1


def test_an_overdue_read_is_given_up_and_an_overdue_put_keeps_its_slots():
    store = MemoryStore()
    rig = Rig(store, call_timeout_s=0.05)
    store.held = True
    rig.submit(MoveKind.PUT, keys=KEYS[:1], slots=(0,))
    late = rig.do(MoveKind.FETCH, keys=KEYS[1:2], slots=(1,), urgent=True)
    assert (late.num_done, late.failure) == (0, MoveFailure.TIMEOUT)
    assert rig.do(MoveKind.LOOKUP, keys=KEYS).failure is MoveFailure.TIMEOUT
    assert not rig.mover.poll()
    store.release()
    assert rig.result().num_done == 1
    rig.mover.close(1.0)


def test_cancelled_reads_end_at_once_and_puts_when_the_store_lets_go(rig: Rig, store: MemoryStore):
    store.held = True
    put = rig.submit(MoveKind.PUT, keys=KEYS[:1], slots=(0,))
    assert store.called.acquire(timeout=LONG_S)
    fetch = rig.submit(MoveKind.FETCH, keys=KEYS[1:3], slots=(1, 2))
    assert store.called.acquire(timeout=LONG_S)
    rig.mover.cancel(put)
    rig.mover.cancel(fetch)
    rig.mover.cancel(12345)
    result = rig.result()
    assert (result.move_id, result.num_done) == (fetch, 0)
    assert result.failure is MoveFailure.CANCELLED
    store.release()
    result = rig.result()
    assert (result.move_id, result.num_done, result.failure) == (put, 1, None)
    assert rig.mover.state().failures == ()


def test_a_late_answer_to_a_cancelled_fetch_writes_nothing(rig: Rig, store: MemoryStore):
    store.pages[KEYS[0]] = b"\xee" * rig.mover.page_bytes
    store.held = True
    move_id = rig.submit(MoveKind.FETCH, keys=KEYS[:1], slots=(0,))
    assert store.called.acquire(timeout=LONG_S)
    rig.mover.cancel(move_id)
    rig.result()
    rig.host.fill(0, b"\x11" * rig.mover.page_bytes)  # the slot has another owner
    store.release()
    rig.do(MoveKind.SAVE, pages=(0,), slots=(1,))
    assert set(rig.host.payload(0)) == {0x11}


def test_more_than_may_wait_is_refused():
    store = MemoryStore()
    rig = Rig(store, max_queued_bytes=1)
    store.held = True
    first = rig.submit(MoveKind.PUT, keys=KEYS[:2], slots=(0, 1))
    refused = Move(77, MoveKind.PUT, keys=KEYS[2:3], slots=(2,))
    assert not rig.mover.submit(refused)
    assert rig.mover.state().num_queued_bytes == 2 * rig.mover.page_bytes
    urgent = Move(78, MoveKind.SAVE, pages=(0,), slots=(3,), urgent=True)
    assert rig.mover.submit(urgent)  # counted apart
    assert rig.result().move_id == 78
    store.release()
    assert rig.result().move_id == first
    assert rig.mover.state().num_queued_bytes == 0
    assert rig.mover.submit(refused)
    rig.mover.close(1.0)
    assert not rig.mover.submit(refused)


def test_without_a_store_pages_go_to_the_host_only():
    rig = Rig()
    assert not rig.mover.has_store
    assert rig.mover.state().breaker == "none"
    assert rig.do(MoveKind.SAVE, pages=(0,), slots=(0,)).num_done == 1
    for kind in (MoveKind.PUT, MoveKind.FETCH, MoveKind.LOOKUP):
        slots = () if kind is MoveKind.LOOKUP else (0,)
        assert not rig.mover.submit(Move(5, kind, keys=KEYS[:1], slots=slots))
    late = MemoryStore()
    rig.mover.attach(late)
    assert rig.mover.has_store
    assert rig.do(MoveKind.PUT, keys=KEYS[:1], slots=(0,)).num_done == 1
    assert rig.mover.state().store_capacity_bytes == 10**9
    rig.mover.close(1.0)
    too_late = MemoryStore()
    rig.mover.attach(too_late)
    assert too_late.closed


def test_a_move_must_make_sense(rig: Rig, store: MemoryStore):
    store.held = True
    with pytest.raises(ValueError, match="save of 2 and 1"):
        rig.mover.submit(Move(1, MoveKind.SAVE, pages=(0, 1), slots=(0,)))
    move = Move(10**7, MoveKind.LOOKUP, keys=KEYS)
    assert rig.mover.submit(move)
    with pytest.raises(ValueError, match="under way"):
        rig.mover.submit(move)


def test_close_finishes_puts_but_awaits_no_dead_store():
    store = MemoryStore()
    rig = Rig(store, background_bytes_per_s=1)  # a page would take minutes
    rig.submit(MoveKind.PUT, keys=KEYS, slots=tuple(range(8)))
    rig.mover.close(LONG_S)
    assert len(store.pages) == 8
    store = MemoryStore()
    rig = Rig(store)
    store.held = True
    rig.submit(MoveKind.PUT, keys=KEYS[:1], slots=(0,))
    begin = time.monotonic()
    rig.mover.close(0.1)
    assert time.monotonic() - begin < LONG_S
    store.release()  # a late reader of the slots finds them
    assert set(store.pages) == {KEYS[0]}


def test_pages_outlive_a_move_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Close gives up waiting, says so, and leaves the memory to the thread that still uses it."""
    monkeypatch.setattr("moestro.runner.transfer._JOIN_S", 0.05)
    rig = Rig()
    mover, inside, leave = rig.mover, threading.Event(), threading.Event()
    save, saved = rig.host.save, []

    def slow_save(*args: Any) -> None:
        inside.set()
        assert leave.wait(LONG_S)
        save(*args)
        saved.append(bytes(rig.host.payload(0))[:8])

    monkeypatch.setattr(rig.host, "save", slow_save)
    tiers = KVTiers(PageLoader(rig.pool.layers, rig.host), mover)
    assert not mover.uses_pools
    rig.submit(MoveKind.SAVE, pages=(3,), slots=(0,))
    other = rig.submit(MoveKind.SAVE, pages=(4,), slots=(1,))
    assert inside.wait(LONG_S)
    assert not tiers.close()
    assert "does not end: their memory is kept" in caplog.text
    assert [r.move_id for r in mover.poll()] == [other]  # the stuck one has not ended
    leave.set()
    for thread in mover._work._threads:
        thread.join(LONG_S)
    assert saved[0] == rig.page(3)[:8]
    assert not mover.uses_pools
    (stuck,) = mover.poll()
    assert (stuck.num_done, stuck.failure) == (1, None)


def test_a_page_larger_than_every_limit_moves_alone():
    store = MemoryStore()
    rig = Rig(store, max_queued_bytes=1, background_bytes_per_s=1 << 40)
    assert rig.do(MoveKind.SAVE, pages=(3,), slots=(0,)).failure is None
    assert rig.do(MoveKind.PUT, slots=(0,), keys=KEYS[:1]).num_done == 1
    assert rig.do(MoveKind.FETCH, slots=(1,), keys=KEYS[:1], urgent=True).num_done == 1
    assert bytes(rig.host.payload(1)) == rig.page(3)
    rig.mover.close(1.0)


def test_dropping_a_mover_ends_its_threads():
    rig = Rig(MemoryStore())
    store = rig.store
    rig.submit(MoveKind.PUT, keys=KEYS[:1], slots=(0,))
    work = weakref.ref(rig.mover._work)
    threads = rig.mover._work._threads
    del rig
    gc.collect()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert store is not None
    assert store.closed
    assert set(store.pages) == {KEYS[0]}
    del threads, thread
    gc.collect()
    assert work() is None


def test_fetches_side_by_side_do_not_count_each_others_time():
    meter, jobs = ReadMeter(), [Job(Move(i, MoveKind.FETCH), 0) for i in range(3)]
    futures: list[Future[None]] = [Future() for _ in jobs]
    begin = time.perf_counter()
    for job, future in zip(jobs, futures, strict=True):
        meter.watch(job, future)
    for future in futures:
        time.sleep(0.02)
        future.set_result(None)
    whole = time.perf_counter() - begin
    assert all(job.store_s >= 0.02 for job in jobs)
    assert sum(job.store_s for job in jobs) <= whole
    assert jobs[0].result().seconds == jobs[0].store_s


def test_background_moves_wait_for_the_budget_and_urgent_ones_do_not():
    rig = Rig(background_bytes_per_s=1)
    rig.submit(MoveKind.SAVE, pages=(0,), slots=(0,))
    assert rig.result().num_done == 1  # the first one spends ahead
    slow = rig.submit(MoveKind.SAVE, pages=(1,), slots=(1,))
    assert rig.do(MoveKind.SAVE, pages=(2,), slots=(2,), urgent=True).num_done == 1
    rig.mover.cancel(slow)
    rig.mover.close(1.0)
    assert [r.failure for r in rig.mover.poll()] == [MoveFailure.CANCELLED]


def test_moves_from_many_threads_each_end_once(rig: Rig):
    results: list[MoveResult] = []

    def work(first: int) -> None:
        for i in range(50):
            slot = first % NUM_SLOTS
            move = Move(first + i, MoveKind.SAVE, pages=(i % 10,), slots=(slot,), urgent=i % 2 == 0)
            assert rig.mover.submit(move)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while len(results) < 200:
        rig.mover.wait(LONG_S)
        results += rig.mover.poll()
    assert len({r.move_id for r in results}) == 200
    assert all(r.failure is None for r in results)
