"""Sessions: names, quotas and counters."""

import pytest

from moestro.core.kv_hints import HintAction, HintAnswer, HintRefusal
from moestro.kvcache import sessions as module
from moestro.kvcache.claim import Claim
from moestro.kvcache.prefix_index import PrefixIndex
from moestro.kvcache.sessions import Pin, SessionKey, Sessions


def pin(key: SessionKey, num_pages: int, expires_s: float = 10.0) -> Pin:
    return Pin(key, Claim(PrefixIndex(4), False, False), num_pages, expires_s)


def test_a_name_means_its_newest_tokens_within_its_tenant() -> None:
    sessions = Sessions()
    sessions.name(("", "a"), b"one")
    sessions.name(("t", "a"), b"other")
    sessions.name(("", "a"), b"newer")
    assert sessions.tokens(("", "a")) == b"newer"
    assert sessions.tokens(("t", "a")) == b"other"
    assert sessions.num_sessions == 2
    sessions.forget(("", "a"))
    assert sessions.tokens(("", "a")) is None


def test_tokens_are_remembered_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_TOKEN_BYTES", 10)
    sessions = Sessions()
    for name in "abc":
        sessions.name(("", name), b"1234")
    assert [sessions.tokens(("", name)) is None for name in "abc"] == [True, False, False]


def test_a_pin_is_replaced_not_added() -> None:
    sessions = Sessions()
    sessions.pin(pin(("", "a"), 20))
    sessions.pin(pin(("", "b"), 25))
    assert sessions.pages_left(("", "a"), 100, 0.25, 0.5) == 25
    assert sessions.pages_left(("", "c"), 100, 0.25, 0.5) == 5
    assert sessions.num_pinned_pages == 45
    assert sessions.unpin(("", "a")) is not None
    assert sessions.unpin(("", "a")) is None
    assert (sessions.num_pins, sessions.num_pinned_pages) == (1, 25)


def test_pins_run_out() -> None:
    sessions = Sessions()
    sessions.pin(pin(("", "a"), 1, 5.0))
    sessions.pin(pin(("", "b"), 1, 6.0))
    assert sessions.expired(4.9) == []
    assert sessions.expired(5.0) == [("", "a")]
    sessions.unpin(("", "a"))
    assert sessions.expired(5.9) == []
    assert sessions.expired(7.0) == [("", "b")]


def test_answers_are_counted_by_action() -> None:
    sessions = Sessions()
    sessions.count(HintAction.PIN, HintAnswer(64, 3))
    sessions.count(HintAction.PIN, HintAnswer(0, 9, HintRefusal.OVER_QUOTA))
    sessions.count(HintAction.DROP, HintAnswer(128, 0))
    pins, drops = sessions.hint_counts()
    assert (pins.num_accepted, pins.num_refused) == (1, 1)
    assert (pins.accepted_tokens, pins.clipped_tokens) == (64, 12)
    assert (drops.action, drops.accepted_tokens) == ("drop", 128)
