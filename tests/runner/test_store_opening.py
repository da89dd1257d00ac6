"""StoreOpening: a store that comes late, not at all, or again, while the engine runs without."""

import gc
import logging
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.fakes.page_store import MemoryStore
from tests.runner.test_host_pool import filled_pool

from moestro.core.page_moves import MoveFailure
from moestro.core.page_store import PageStore, StoreError
from moestro.errors import ConfigError
from moestro.runner import store_opening
from moestro.runner.host_pool import HostPool
from moestro.runner.store_opening import StoreOpening
from moestro.runner.transfer import PageTransfer, TransferLimits

LONG_S = 30.0
DIGEST = b"d" * 16


@pytest.fixture
def transfer() -> Iterator[PageTransfer]:
    made = PageTransfer(HostPool(filled_pool(torch.bfloat16), 2), TransferLimits())
    yield made
    made.close(1.0)


def known(_is_stopped: Callable[[], bool]) -> bytes:
    return DIGEST


def test_a_store_is_there_when_building_waits_for_it(transfer: PageTransfer):
    asked: list[bytes] = []
    store = MemoryStore()

    def open_store(digest: bytes) -> PageStore:
        asked.append(digest)
        return store

    StoreOpening(transfer, known, open_store).start(LONG_S)
    assert transfer.has_store
    assert asked == [DIGEST]
    transfer.close(1.0)
    assert store.closed


def test_the_engine_runs_without_until_the_digest_is_known(transfer: PageTransfer):
    go_on = threading.Event()

    def digest(_is_stopped: Callable[[], bool]) -> bytes:
        assert go_on.wait(LONG_S)
        return DIGEST

    opening = StoreOpening(transfer, digest, lambda _: MemoryStore())
    opening.start(0.0)
    assert not transfer.has_store
    go_on.set()
    opening._thread.join(LONG_S)
    assert transfer.has_store


def test_a_store_that_is_down_is_tried_again(
    transfer: PageTransfer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(store_opening, "RETRY_S", 0.01)
    failures = [MoveFailure.UNAVAILABLE, MoveFailure.FULL]

    def open_store(_digest: bytes) -> PageStore:
        if failures:
            raise StoreError(failures.pop(0), "nobody answers")
        return MemoryStore()

    opening = StoreOpening(transfer, known, open_store)
    opening.start(LONG_S)
    opening._thread.join(LONG_S)
    assert transfer.has_store
    assert caplog.text.count("nobody answers") == 2
    assert dict(transfer.state().failures) == {"unavailable": 1, "full": 1}
    assert transfer.state().breaker == "closed"


def test_while_it_is_down_the_breaker_says_so(transfer: PageTransfer):
    def open_store(_digest: bytes) -> PageStore:
        raise StoreError(MoveFailure.UNAVAILABLE, "nobody answers")

    opening = StoreOpening(transfer, known, open_store)
    opening.start(LONG_S)
    assert not transfer.has_store
    assert transfer.state().breaker == "open"
    opening.close()
    opening._thread.join(LONG_S)
    assert not opening._thread.is_alive()


def test_a_wrong_option_is_raised(transfer: PageTransfer):
    def open_store(_digest: bytes) -> PageStore:
        raise ConfigError("kv_store is 'x'")

    with pytest.raises(ConfigError, match="kv_store is 'x'"):
        StoreOpening(transfer, known, open_store).start(LONG_S)


@pytest.mark.parametrize("error", [OSError("weights are gone"), ZeroDivisionError("a bug")])
def test_no_digest_no_store(
    transfer: PageTransfer, error: Exception, caplog: pytest.LogCaptureFixture
):
    def digest(_is_stopped: Callable[[], bool]) -> bytes:
        raise error

    with caplog.at_level(logging.WARNING):
        StoreOpening(transfer, digest, lambda _: MemoryStore()).start(LONG_S)
    assert not transfer.has_store
    assert "the KV store stays off" in caplog.text
    assert str(error) in caplog.text


def test_it_ends_with_the_engine(transfer: PageTransfer):
    def digest(is_stopped: Callable[[], bool]) -> bytes | None:
        while not is_stopped():
            threading.Event().wait(0.01)
        return None

    opening = StoreOpening(transfer, digest, lambda _: MemoryStore())
    opening.start(0.0)
    opening.close()
    opening._thread.join(LONG_S)
    assert not transfer.has_store
    dropped = PageTransfer(HostPool(filled_pool(torch.bfloat16), 2), TransferLimits())
    opening = StoreOpening(dropped, digest, lambda _: MemoryStore())
    opening.start(0.0)
    del dropped
    gc.collect()
    opening._thread.join(LONG_S)
    assert not opening._thread.is_alive()


def test_what_is_opened_too_late_is_closed(transfer: PageTransfer):
    store, go_on, opened = MemoryStore(), threading.Event(), threading.Event()

    def open_store(_digest: bytes) -> PageStore:
        opened.set()
        assert go_on.wait(LONG_S)
        return store

    opening = StoreOpening(transfer, known, open_store)
    opening.start(0.0)
    assert opened.wait(LONG_S)
    opening.close()
    go_on.set()
    opening._thread.join(LONG_S)
    assert store.closed
    assert not transfer.has_store
