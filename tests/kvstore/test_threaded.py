"""Futures that are done in time whatever the backend does; lanes, breaker, bounded queues."""

import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import pytest
from tests.kvstore.memory_backend import MemoryBackend, unavailable

from moestro.core.page_moves import MoveFailure
from moestro.core.page_store import StoreError
from moestro.kvstore import threaded
from moestro.kvstore.threaded import ThreadedStore

TIMEOUT_S = 0.2
DIGEST = bytes(16)
KEY = b"k" * 16


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


@pytest.fixture
def store(backend: MemoryBackend) -> Iterator[ThreadedStore]:
    made = ThreadedStore(backend, DIGEST, timeout_s=TIMEOUT_S, max_pending_bytes=1000)
    yield made
    backend.gate.set()
    made.close(5.0)


def failure(future: "Future[object]") -> MoveFailure:
    """How it failed, once it is done; a future that isn't done in time fails the test."""
    with pytest.raises(StoreError) as caught:
        future.result(TIMEOUT_S + 5)
    return caught.value.failure


def until(condition: Callable[[], object]) -> None:
    """Wait for a thread to get somewhere."""
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not come to that")


def test_a_stuck_call_costs_its_timeout_and_no_more(
    backend: MemoryBackend, store: ThreadedStore
) -> None:
    backend.gate.clear()
    start = time.monotonic()
    assert failure(store.get_many([KEY])) is MoveFailure.TIMEOUT
    assert TIMEOUT_S <= time.monotonic() - start < TIMEOUT_S + 4
    backend.gate.set()
    assert store.get_many([KEY]).result(5) == [MoveFailure.MISSING]


def test_a_late_answer_is_thrown_away(backend: MemoryBackend, store: ThreadedStore) -> None:
    backend.gate.clear()
    late = store.put_many([(KEY, b"page")])
    assert failure(late) is MoveFailure.TIMEOUT
    backend.gate.set()
    assert store.put_many([(KEY, b"page")]).result(5) == 1
    assert isinstance(late.exception(), StoreError)


def test_a_stuck_writer_blocks_no_reader(backend: MemoryBackend, store: ThreadedStore) -> None:
    store.put_many([(KEY, b"page")]).result(5)
    backend.hold_reads = False
    backend.gate.clear()
    stuck = [store.put_many([(b"l" * 16, b"page")]) for _ in range(3)]
    assert store.get_many([KEY]).result(TIMEOUT_S) == [b"page"]
    assert store.exists_many([KEY]).result(TIMEOUT_S) == [True]
    assert [failure(f) for f in stuck] == [MoveFailure.TIMEOUT] * 3
    until(lambda: store.usage().breaker == "open")
    assert store.get_many([KEY]).result(TIMEOUT_S) == [b"page"]


def test_the_breaker_answers_for_a_dead_store_and_tries_again(backend: MemoryBackend) -> None:
    now = [0.0]
    store = ThreadedStore(backend, DIGEST, timeout_s=TIMEOUT_S, clock=lambda: now[0])
    backend.errors = [unavailable() for _ in range(3)]
    for _ in range(3):
        assert failure(store.get_many([KEY])) is MoveFailure.UNAVAILABLE
    until(lambda: store.usage().breaker == "open")
    num_calls = len(backend.calls)
    start = time.monotonic()
    assert failure(store.get_many([KEY])) is MoveFailure.UNAVAILABLE
    assert time.monotonic() - start < TIMEOUT_S
    assert len(backend.calls) == num_calls
    now[0] = 1.0
    assert store.usage().breaker == "half_open"
    assert store.get_many([KEY]).result(5) == [MoveFailure.MISSING]
    until(lambda: store.usage().breaker == "closed")
    store.close(5.0)


def test_what_is_no_fault_of_the_store_opens_nothing(
    backend: MemoryBackend, store: ThreadedStore
) -> None:
    for _ in range(10):
        assert store.get_many([KEY]).result(5) == [MoveFailure.MISSING]
    backend.values[DIGEST + KEY] = b"garbage"
    assert store.get_many([KEY]).result(5) == [MoveFailure.CORRUPT]
    assert store.usage().breaker == "closed"
    assert store.usage().num_quarantined == 1


def test_too_much_waiting_is_refused_at_once(backend: MemoryBackend, store: ThreadedStore) -> None:
    backend.gate.clear()
    running = store.put_many([(b"1" * 16, bytes(5000))])  # alone, so it may exceed the limit
    until(lambda: backend.calls)
    waiting = store.put_many([(b"2" * 16, bytes(900))])
    assert not waiting.done()
    refused = store.put_many([(b"3" * 16, bytes(200))])
    assert refused.done()
    assert failure(refused) is MoveFailure.UNAVAILABLE
    assert "behind" in str(refused.exception())
    backend.gate.set()
    assert (running.result(5), waiting.result(5)) == (1, 1)
    until(lambda: store.put_many([(b"3" * 16, bytes(200))]).exception(5) is None)


def test_many_small_calls_are_refused_too(backend: MemoryBackend) -> None:
    store = ThreadedStore(backend, DIGEST, timeout_s=60.0)  # none is late on a busy machine
    backend.gate.clear()
    futures = [store.exists_many([KEY]) for _ in range(300)]
    refused = [f for f in futures if f.done()]
    assert 40 <= len(refused) <= 45
    assert {failure(f) for f in refused} == {MoveFailure.UNAVAILABLE}
    backend.gate.set()
    store.close(5.0)


def test_waiting_behind_others_does_not_count_against_the_store(backend: MemoryBackend) -> None:
    store = ThreadedStore(backend, DIGEST, timeout_s=TIMEOUT_S)
    slow = backend.get_many

    def get_many(*arguments: object) -> object:
        time.sleep(0.4 * TIMEOUT_S)
        return slow(*arguments)  # type: ignore[arg-type]

    backend.get_many = get_many  # type: ignore[method-assign,assignment]
    futures = [store.get_many([KEY]) for _ in range(10)]
    outcomes = [f.exception(5) for f in futures]
    assert outcomes[0] is None
    assert isinstance(outcomes[-1], StoreError)
    assert store.usage().breaker == "closed"
    store.close(5.0)


def test_an_unforeseen_error_is_an_error_of_the_call(
    backend: MemoryBackend, store: ThreadedStore, caplog: pytest.LogCaptureFixture
) -> None:
    backend.errors = [ZeroDivisionError("of a client library")]
    assert failure(store.get_many([KEY])) is MoveFailure.ERROR
    assert "ZeroDivisionError" in caplog.text
    assert store.get_many([KEY]).result(5) == [MoveFailure.MISSING]


def test_a_future_can_not_be_cancelled_from_outside(
    backend: MemoryBackend, store: ThreadedStore
) -> None:
    backend.gate.clear()
    future = store.put_many([(KEY, b"page")])
    assert not future.cancel()
    backend.gate.set()
    assert future.result(5) == 1


def test_a_full_store_takes_what_fits(backend: MemoryBackend, store: ThreadedStore) -> None:
    backend.max_pages = 2
    assert store.put_many([(bytes([i]) * 16, b"page") for i in range(3)]).result(5) == 2
    assert failure(store.put_many([(b"x" * 16, b"page")])) is MoveFailure.FULL
    assert store.put_many([(bytes(16), b"page")]).result(5) == 1


def test_closing_cancels_what_can_not_be_done_in_time(backend: MemoryBackend) -> None:
    store = ThreadedStore(backend, DIGEST, timeout_s=30.0)
    backend.gate.clear()
    running = store.put_many([(KEY, b"page")])
    waiting = store.put_many([(b"l" * 16, b"page")])
    start = time.monotonic()
    store.close(0.2)
    assert time.monotonic() - start < 5
    assert failure(running) is failure(waiting) is MoveFailure.CANCELLED
    assert backend.num_closed == 0  # a thread is still inside
    backend.gate.set()
    until(lambda: backend.num_closed)
    assert b"l" * 16 not in backend.values


def test_closing_writes_what_is_waiting(backend: MemoryBackend) -> None:
    store = ThreadedStore(backend, DIGEST, timeout_s=30.0, max_pending_bytes=1000)
    futures = [store.put_many([(bytes([i]) * 16, b"page")]) for i in range(20)]
    store.close(5.0)
    assert [f.result(0) for f in futures] == [1] * 20
    assert backend.calls[-1] == "maintain"
    assert backend.num_closed == 1


def test_upkeep_goes_on_while_calls_come(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threaded, "MAINTAIN_EVERY_S", 0.05)
    store = ThreadedStore(backend, DIGEST, timeout_s=5.0)

    def put_and_look() -> bool:
        store.put_many([(KEY, b"page")]).result(5)
        return backend.calls.count("maintain") >= 3

    until(put_and_look)
    until(lambda: backend.calls.count("maintain") >= 6)  # and without any
    store.close(5.0)


def test_a_payload_changed_after_the_timeout_is_never_stored_as_the_page(
    backend: MemoryBackend,
) -> None:
    store = ThreadedStore(backend, DIGEST, timeout_s=TIMEOUT_S)
    backend.gate.clear()
    stuck = store.put_many([(b"1" * 16, b"first")])
    payload = bytearray(b"right")
    waiting = store.put_many([(KEY, payload)])
    assert failure(stuck) is failure(waiting) is MoveFailure.TIMEOUT
    payload[:] = b"wrong"
    backend.gate.set()
    until(lambda: store.put_many([(b"2" * 16, b"second")]).exception(5) is None)
    assert store.get_many([KEY]).result(5) == [MoveFailure.MISSING]
    store.close(5.0)


def test_nothing_of_a_call_is_kept_once_it_is_done(backend: MemoryBackend) -> None:
    """The watchdog would let go only at the deadline: gigabytes, with fast reads."""
    store = ThreadedStore(backend, DIGEST, timeout_s=60.0)
    page = np.zeros(1000, np.uint8)
    put = store.put_many([(KEY, page.data)])
    assert put.result(5) == 1
    (payload,) = store.get_many([KEY]).result(5)
    assert isinstance(payload, memoryview)
    kept = [weakref.ref(page), weakref.ref(payload)]
    del page, payload, put
    until(lambda: [ref() for ref in kept] == [None, None])
    store.close(5.0)


def test_upkeep_that_keeps_failing_is_told_once(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threaded, "MAINTAIN_EVERY_S", 0.01)
    num_tries = []

    def maintain() -> None:
        num_tries.append(1)
        raise unavailable()

    monkeypatch.setattr(backend, "maintain", maintain)
    store = ThreadedStore(backend, DIGEST, timeout_s=5.0)
    until(lambda: len(num_tries) >= 5)
    assert caplog.text.count("no answer") == 1
    store.close(5.0)


def test_a_digest_of_another_length_is_refused(backend: MemoryBackend) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        ThreadedStore(backend, b"short", timeout_s=1.0)
