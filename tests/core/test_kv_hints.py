"""Hints say what is wrong with them: names, ranges, contradictions."""

import math
from typing import Any

import pytest

from moestro.core.kv_hints import (
    MAX_SESSION_ID_CHARS,
    MAX_TTL_S,
    HintAction,
    HintRequest,
    KVHints,
    PrefixUse,
)
from moestro.errors import RequestError


def test_hints_at_their_limits_are_taken() -> None:
    hints = KVHints(session_id="s" * MAX_SESSION_ID_CHARS, pin_ttl_s=MAX_TTL_S, priority=100)
    assert hints.pin_ttl_s == MAX_TTL_S
    assert KVHints(pin_ttl_s=0, drop_on_finish=True).drop_on_finish
    assert KVHints() == KVHints(priority=50)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"session_id": ""}, "session_id", "1 to 256 characters"),
        ({"session_id": "s" * 257}, "session_id", "got 257"),
        ({"session_id": 7}, "session_id", "must be text"),
        ({"session_id": "a\0b"}, "session_id", "must be printable"),
        ({"pin_ttl_s": -1}, "pin_ttl_s", r"must be in \[0, 86400\]"),
        ({"pin_ttl_s": 86_401}, "pin_ttl_s", "got 86401"),
        ({"pin_ttl_s": math.nan}, "pin_ttl_s", "got nan"),
        ({"pin_ttl_s": math.inf}, "pin_ttl_s", "got inf"),
        ({"pin_ttl_s": True}, "pin_ttl_s", "number of seconds"),
        ({"pin_ttl_s": "60"}, "pin_ttl_s", "number of seconds"),
        ({"priority": -1}, "priority", r"\[0, 100\], got -1"),
        ({"priority": 101}, "priority", "got 101"),
        ({"priority": 1.5}, "priority", "an integer"),
        ({"priority": True}, "priority", "an integer"),
        ({"drop_on_finish": 1}, "drop_on_finish", "true or false"),
        ({"drop_on_finish": True, "pin_ttl_s": 60}, "drop_on_finish", "contradict"),
    ],
)
def test_a_wrong_hint_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        KVHints(**fields)
    assert caught.value.param == f"kv_hints.{param}"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"action": HintAction.PIN, "ttl_s": 1.0}, "session_id", "either a session_id or a prompt"),
        (
            {"action": HintAction.DROP, "session_id": "a", "token_ids": (1,)},
            "session_id",
            "not both",
        ),
        ({"action": HintAction.PIN, "session_id": "a"}, "ttl_s", "pin needs ttl_s"),
        ({"action": HintAction.PIN, "session_id": "a", "ttl_s": -0.5}, "ttl_s", "got -0.5"),
        ({"action": HintAction.DEMOTE, "session_id": "a", "ttl_s": 5}, "ttl_s", "takes no ttl_s"),
        ({"action": HintAction.DROP, "session_id": "a", "ttl_s": 5}, "ttl_s", "takes no ttl_s"),
        ({"action": HintAction.DROP, "token_ids": ()}, "prompt_token_ids", "empty"),
    ],
)
def test_a_wrong_command_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        HintRequest(**fields)
    assert caught.value.param == param


def test_cached_tokens_add_up_over_the_tiers() -> None:
    assert PrefixUse(device_tokens=1, host_tokens=20, store_tokens=300).num_cached_tokens == 321
