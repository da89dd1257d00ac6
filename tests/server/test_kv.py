"""Hints by route and by request, timing in answers: what arrives, what is told, what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from tests.server.client import USER, call, events_of, make_context, post
from tests.server.fake_engine import FakeEngine
from tests.server.test_bad_input import error_of

from moestro.core.kv_hints import HintAction, KVHints

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TIMING = {
    "queue_s": 0.5,
    "lookup_s": 0.0,
    "load_host_s": 0.25,
    "load_store_s": 0.0,
    "prefill_s": 1.0,
    "first_token_s": 1.5,
    "decode_s": 2.0,
    "cached_tokens": {"device": 64, "host": 128, "store": 0},
    "miss_reason": "differs",
    "first_difference": 200,
    "num_draft_tokens": 0,
    "num_accepted_tokens": 0,
}
PINNED = {"accepted": 8, "requested": 0, "clipped": 1, "refused": None, "expires_at": 1060.0}


@pytest.mark.parametrize(
    ("body", "token_ids"),
    [
        ({"prompt_token_ids": [1, 2, 3, 4, 5]}, (1, 2, 3, 4, 5)),
        ({"prompt": "abcde"}, (0, 1, 2, 3, 4)),
        ({"messages": [USER]}, (20, 7, 8)),  # "uhi": the user's role and words
        ({"messages": [USER], "add_generation_prompt": True}, (20, 7, 8, 0)),
    ],
)
@pytest.mark.parametrize("action", list(HintAction))
def test_a_hint_names_a_prefix(
    action: HintAction, body: dict[str, Any], token_ids: tuple[int, ...]
) -> None:
    engine = FakeEngine()
    ttl = {"ttl_s": 60} if action in (HintAction.PIN, HintAction.PREFETCH) else {}
    answer = post(make_context(engine), f"/v1/kv/{action}", {**body, **ttl, "cache_salt": "me"})
    assert answer.status_code == 200
    accepted = len(token_ids) // 4 * 4
    assert answer.json() == {
        "accepted": accepted,
        "requested": 0,
        "clipped": len(token_ids) - accepted,
        "refused": None,
        "expires_at": 1060.0 if ttl else None,
    }
    (hint,) = engine.cache.hints
    assert (hint.action, hint.token_ids, hint.cache_salt) == (action, token_ids, "me")
    assert engine.special_tokens is ("messages" not in body)


def test_a_hint_names_a_session() -> None:
    context = make_context(FakeEngine())
    known = post(context, "/v1/kv/demote", {"session_id": "known", "model": "tiny"})
    assert known.json() == PINNED | {"clipped": 2, "expires_at": None}
    unknown = post(context, "/v1/kv/demote", {"session_id": "else"})
    assert unknown.status_code == 200
    assert unknown.json() == {
        "accepted": 0,
        "requested": 0,
        "clipped": 0,
        "refused": "unknown_session",
        "expires_at": None,
    }


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("pin", {"session_id": "s"}, "ttl_s", "pin needs ttl_s"),
        ("pin", {"session_id": "s", "ttl_s": -1}, "ttl_s", "[0, 86400] seconds, got -1"),
        ("pin", {"session_id": "s", "ttl_s": 1e9}, "ttl_s", "got 1000000000.0"),
        ("pin", {"session_id": "s", "ttl_s": "60"}, "body.ttl_s", "validation error"),
        ("pin", {"session_id": "", "ttl_s": 1}, "session_id", "1 to 256 characters"),
        ("pin", {"session_id": "s" * 257, "ttl_s": 1}, "session_id", "got 257"),
        ("pin", {"session_id": "s", "ttl_s": 10**400}, "body.ttl_s", "validation error"),
        ("pin", {"session_id": "s", "ttl_s": True}, "body.ttl_s", "validation error"),
        ("pin", {"session_id": "s", "ttl_s": [1]}, "body.ttl_s", "validation error"),
        ("pin", {"session_id": 7, "ttl_s": 1}, "body.session_id", "validation error"),
        ("pin", {"session_id": "\0", "ttl_s": 1}, "session_id", "printable"),
        ("drop", {"prompt_token_ids": [1.5]}, "body.prompt_token_ids.0", "validation error"),
        ("drop", {"prompt_token_ids": {}}, "body.prompt_token_ids", "validation error"),
        ("drop", {"messages": "hi"}, "body.messages", "validation error"),
        ("pin", {"ttl_s": 1}, "prompt", "got none of them"),
        ("drop", {"session_id": "s", "ttl_s": 1}, "ttl_s", "takes no ttl_s"),
        ("drop", {"session_id": "s", "prompt": "a"}, "prompt", "session_id and prompt"),
        ("drop", {"prompt": "a", "messages": [USER]}, "messages", "exactly one"),
        ("drop", {"prompt": "a", "tools": []}, "tools", "goes with messages only"),
        ("drop", {"prompt_token_ids": ["a"]}, "body.prompt_token_ids.0", "validation error"),
        ("drop", {"prompt": "a", "sesion_id": "s"}, "sesion_id", "Did you mean 'session_id'"),
        ("drop", {"prompt": "a", "cache_salt": 5}, "body.cache_salt", "validation error"),
        ("demote", {"messages": []}, "messages", ""),
        ("explain", {}, "prompt", "exactly one of prompt, prompt_token_ids or messages"),
        ("explain", {"session_id": "s"}, "session_id", "Unknown field"),
        ("explain", {"prompt": "a", "ttl_s": 5}, "ttl_s", "Unknown field"),
    ],
)
def test_a_wrong_hint_is_refused(path: str, body: dict[str, Any], param: str, words: str) -> None:
    error = error_of(post(make_context(FakeEngine()), f"/v1/kv/{path}", body))
    assert error["param"] == param
    assert words in error["message"]


def test_a_hint_for_another_model_or_by_another_method() -> None:
    context = make_context(FakeEngine())
    body = {"session_id": "known", "model": "other"}
    assert error_of(post(context, "/v1/kv/drop", body), 404)["param"] == "model"
    error_of(call(context, "GET", "/v1/kv/drop"), 405)
    error_of(post(context, "/v1/kv/unpin", body), 404)


def test_a_hint_to_a_dead_engine() -> None:
    error = error_of(post(make_context(FakeEngine(dead=True)), "/v1/kv/drop", {"prompt": "a"}), 500)
    assert "<path>" in error["message"]


def test_a_prompt_is_explained() -> None:
    engine = FakeEngine()
    answer = post(make_context(engine), "/v1/kv/explain", {"prompt": "abcde", "cache_salt": "me"})
    assert answer.json() == {
        "prompt_tokens": 5,
        "cached_tokens": {"device": 4, "host": 0, "store": 8},
        "miss_reason": "differs",
        "first_difference": 12,
    }
    assert engine.cache.asked == [((0, 1, 2, 3, 4), "me")]


def test_what_other_tenants_have_is_not_told() -> None:
    body = {"prompt": "abcde", "cache_salt": "nosy"}
    answer = post(make_context(FakeEngine()), "/v1/kv/explain", body).json()
    assert answer["miss_reason"] == "no_prefix"


@pytest.mark.parametrize(("path", "ask"), [(CHAT, {"messages": [USER]}), (TEXT, {"prompt": "a"})])
def test_hints_and_timing_of_a_request(path: str, ask: dict[str, Any]) -> None:
    engine = FakeEngine()
    context = make_context(engine)
    hints = {"session_id": "s", "pin_ttl_s": 60, "priority": 90, "drop_on_finish": False}
    body = {**ask, "max_tokens": 3, "kv_hints": hints, "include_timing": True}
    answer = post(context, path, body).json()
    assert engine.calls[0].options["kv_hints"] == KVHints(session_id="s", pin_ttl_s=60, priority=90)
    assert (answer["timing"], answer["kv_hints"]) == (TIMING, PINNED)
    plain = post(context, path, {**ask, "max_tokens": 3}).json()
    assert "timing" not in plain
    assert "kv_hints" not in plain
    told = post(replace(context, tells_timing=True), path, {**ask, "max_tokens": 3}).json()
    assert told["timing"] == TIMING


@pytest.mark.parametrize(("path", "ask"), [(CHAT, {"messages": [USER]}), (TEXT, {"prompt": "a"})])
@pytest.mark.parametrize("usage", [True, False])
def test_a_stream_ends_with_timing(path: str, ask: dict[str, Any], usage: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": usage}, "max_tokens": 3}
    body = {**ask, **options, "include_timing": True, "kv_hints": {"priority": 1}}
    *chunks, last, done = events_of(post(make_context(FakeEngine()), path, body).text)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert (last["timing"], last["kv_hints"]) == (TIMING, PINNED)
    assert ("usage" in last) is usage
    assert all("timing" not in chunk and "kv_hints" not in chunk for chunk in chunks)
    *_, last, _ = events_of(post(make_context(FakeEngine()), path, {**ask, **options}).text)
    assert "timing" not in last


def test_several_prompts_have_a_timing_each() -> None:
    body = {"prompt": ["a", "b"], "max_tokens": 2, "include_timing": True, "kv_hints": {}}
    answer = post(make_context(FakeEngine()), TEXT, body).json()
    assert answer["timing"] == [TIMING, TIMING]
    assert answer["kv_hints"] == [PINNED, PINNED]


@pytest.mark.parametrize(
    ("hints", "param", "words"),
    [
        ({"pin_ttl_s": -5}, "kv_hints.pin_ttl_s", "[0, 86400] seconds, got -5"),
        ({"priority": 101}, "kv_hints.priority", "[0, 100], got 101"),
        ({"session_id": ""}, "kv_hints.session_id", "1 to 256 characters"),
        ({"drop_on_finish": True, "pin_ttl_s": 5}, "kv_hints.drop_on_finish", "contradict"),
        ({"priority": "high"}, "body.kv_hints.priority", "validation error"),
        ({"pin_ttl": 5}, "body.kv_hints.pin_ttl", "validation error"),
        ({"pin_ttl_s": 10**400}, "body.kv_hints.pin_ttl_s", "validation error"),
        ({"pin_ttl_s": "5"}, "body.kv_hints.pin_ttl_s", "validation error"),
        ({"priority": 10**400}, "kv_hints.priority", ""),
        ({"priority": -1}, "kv_hints.priority", "[0, 100], got -1"),
        ({"priority": 1.5}, "body.kv_hints.priority", "validation error"),
        ({"session_id": 5}, "body.kv_hints.session_id", "validation error"),
        ({"drop_on_finish": "yes"}, "body.kv_hints.drop_on_finish", "validation error"),
        ("pin", "body.kv_hints", "validation error"),
        ([], "body.kv_hints", "validation error"),
    ],
)
@pytest.mark.parametrize(("path", "ask"), [(CHAT, {"messages": [USER]}), (TEXT, {"prompt": "a"})])
def test_wrong_hints_of_a_request_are_refused(
    path: str, ask: dict[str, Any], hints: Any, param: str, words: str
) -> None:
    error = error_of(post(make_context(FakeEngine()), path, {**ask, "kv_hints": hints}))
    assert error["param"] == param
    assert words in error["message"]


def test_the_routes_are_described() -> None:
    described = call(make_context(FakeEngine()), "GET", "/openapi.json").json()
    for name in ("pin", "prefetch", "demote", "drop"):
        schema = described["paths"][f"/v1/kv/{name}"]["post"]["requestBody"]["content"]
        assert schema["application/json"]["schema"]["$ref"].endswith("/HintBody")
    assert "ttl_s" in described["components"]["schemas"]["HintBody"]["properties"]
