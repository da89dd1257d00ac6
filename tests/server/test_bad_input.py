"""Everything a client can get wrong: a 400 in vLLM's envelope, never a 500, never a crash."""

import json
from dataclasses import replace
from typing import Any

import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import pytest
from tests.server.client import USER, call, make_context, post
from tests.server.fake_engine import FakeEngine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}


def raw(content: bytes, headers: dict[str, str] | None = None, path: str = TEXT) -> Any:
    return call(make_context(FakeEngine()), "POST", path, content=content, headers=headers or JSON)


def error_of(response: Any, status: int = 400) -> dict[str, Any]:
    """The error object, once its shape and status are what they must be."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["message"]
    return dict(error)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"nul",
        b'{"prompt": "a",}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00\\ud800"}',
        b'{"prompt": "a"} {}',
        b"[" * 50_000,
        b'{"prompt":' * 10_000,
        b"\xff\xfe\x00",
    ],
    ids=lambda c: repr(c[:20]),
)
def test_malformed_json(content: bytes) -> None:
    error = error_of(raw(content))
    assert error["param"] == "body"
    assert "JSON" in error["message"]


@pytest.mark.parametrize("content", [b"[]", b"null", b'"x"', b"5", b"true"])
def test_json_that_is_no_object(content: bytes) -> None:
    assert "must be a JSON object" in error_of(raw(content))["message"]


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded"])
def test_wrong_content_type(kind: str) -> None:
    error = error_of(raw(b'{"prompt": "a"}', {"content-type": kind}))
    assert error["message"] == "Unsupported Media Type: Only 'application/json' is allowed"


def test_content_type_with_parameters_is_fine() -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert raw(b'{"prompt": "a"}', headers).status_code == 200


def test_body_over_the_limit() -> None:
    error = error_of(raw(b'{"prompt": "' + b"a" * 200_000 + b'"}'), 413)
    assert "100000 bytes" in error["message"]


@pytest.mark.parametrize(
    ("headers", "num_parts", "num_read"),
    [
        ({}, 30, 30),  # read to its end, so that the client gets to reading the answer
        ({"content-length": "300000"}, 30, 30),
        ({}, 1000, 161),
        ({"content-length": "10000000"}, 1000, 0),
        ({"content-length": "300000", "expect": "100-continue"}, 30, 0),
    ],
)
def test_how_much_of_a_large_body_is_read(
    headers: dict[str, str], num_parts: int, num_read: int
) -> None:
    read = 0

    async def parts() -> Any:
        nonlocal read
        for _ in range(num_parts):
            read += 1
            yield b" " * 10_000

    context = make_context(FakeEngine())
    error_of(call(context, "POST", TEXT, content=parts(), headers={**JSON, **headers}), 413)
    assert read == num_read


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -1, "temperature must be in [0, 2], got -1.0."),
        ("temperature", 3.0, "temperature must be in [0, 2], got 3.0."),
        ("top_p", 0, "top_p must be in (0, 1], got 0.0."),
        ("top_p", 1.5, "top_p must be in (0, 1], got 1.5."),
        ("top_k", -2, "top_k must be at least 0, got -2."),
        ("min_p", 2, "min_p must be in [0, 1], got 2.0."),
        ("n", 0, "n must be at least 1, got 0."),
        ("n", 10**9, "n must be at most 128, got 1000000000."),
        ("max_tokens", 0, "max_tokens must be at least 1, got 0."),
        ("max_tokens", -5, "max_tokens must be at least 1, got -5."),
        ("min_tokens", -1, "min_tokens must be at least 0, got -1."),
        ("min_tokens", 99, "min_tokens must be at most max_tokens=16, got 99."),
        ("presence_penalty", 9, "presence_penalty must be in [-2, 2], got 9.0."),
        ("repetition_penalty", 0, "repetition_penalty must be in (0, 1e+38], got 0.0."),
        ("seed", 2**70, f"seed must be at most {2**64 - 1}, got {2**70}."),
        ("prompt_logprobs", -1, "prompt_logprobs must be at least 0, got -1."),
        ("logprobs", 21, "logprobs must be at most 20, got 21."),
        ("stop", "", "stop must not hold an empty string."),
        ("logit_bias", {"5": 200}, "logit_bias must be in [-100, 100], got 200.0 for token 5."),
        (
            "logit_bias",
            {"x": 1},
            "logit_bias must map token ids to numbers, each id once, got {'x': 1.0}.",
        ),
    ],
)
def test_values_out_of_range(field: str, value: object, message: str) -> None:
    error = error_of(post(make_context(FakeEngine()), TEXT, {"prompt": "a", field: value}))
    assert error == {
        "message": message,
        "type": "BadRequestError",
        "param": field,
        "code": 400,
    }


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(word: str) -> None:
    error = error_of(raw(b'{"prompt": "a", "temperature": %s}' % word.encode()))
    assert error["param"] == "temperature"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("max_tokens", "5"),
        ("max_tokens", 5.5),
        ("max_tokens", [5]),
        ("n", {}),
        ("stop", 7),
        ("stop", [1]),
        ("stop_token_ids", "5"),
        ("stream", "yes"),
        ("stream", 1),
        ("logprobs", True),
        ("echo", "true"),
        ("logit_bias", [1, 2]),
        ("cache_salt", 5),
        ("priority", 1.5),
        ("prompt", None),
        ("prompt", {"text": "a"}),
        ("prompt", [1, "a"]),
        ("prompt", [[1], "a"]),
        ("prompt", [1.5]),
        ("prompt", True),
    ],
)
def test_wrong_types(field: str, value: object) -> None:
    body = {"prompt": "a", field: value}
    error = error_of(post(make_context(FakeEngine()), TEXT, body))
    assert error["type"] == "Bad Request"
    assert error["param"].startswith(f"body.{field}")
    assert "validation error" in error["message"]


def test_missing_prompt_and_empty_lists() -> None:
    context = make_context(FakeEngine())
    assert error_of(post(context, TEXT, {}))["param"] == "body.prompt"
    assert error_of(post(context, TEXT, {"prompt": []}))["param"] == "prompt"
    assert error_of(post(context, TEXT, {"prompt": ["a"] * 2000}))["param"] == "prompt"


def test_long_inputs_are_cut_and_many_errors_are_counted() -> None:
    context = make_context(FakeEngine())
    error = error_of(post(context, TEXT, {"prompt": "a", "max_tokens": "9" * 5000}))
    assert len(error["message"]) < 600
    numbers = ("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens")
    body = dict.fromkeys((*numbers, "presence_penalty", "echo", "stream", "logprobs"), "x")
    error = error_of(post(context, TEXT, {"prompt": "a", **body}))
    assert error["message"].startswith("12 validation errors:\n  {")
    assert error["message"].endswith("...and 2 more errors")
    assert error["param"] == "body.n"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": [5, "a"] * 50_000}, "body.prompt"),
        (TEXT, {"prompt": [[5], "a"] * 50_000}, "body.prompt"),
        (TEXT, {"prompt": "a", "stop": [5] * 50_000}, "body.stop"),
        (TEXT, {"prompt": "a", "stop_token_ids": ["x"] * 50_000}, "body.stop_token_ids.0"),
        (TEXT, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(9999)), "x")}, None),
        (CHAT, {"messages": [5] * 50_000}, "body.messages.0"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 20_000}, "body.messages"),
        (CHAT, {"messages": [{"role": "user", "content": [5] * 50_000}]}, None),
    ],
)
def test_a_long_list_is_read_to_its_first_mistake(path: str, body: Any, param: str | None) -> None:
    """All mistakes of a body of megabytes take minutes, in which nobody else is served."""
    context = replace(make_context(FakeEngine()), max_body_bytes=10_000_000)
    error = error_of(post(context, path, body))
    assert int(error["message"].split()[0]) <= 4  # one for each shape it might have had
    assert param is None or error["param"] == param


def test_unknown_fields_are_refused_by_name() -> None:
    error = error_of(post(make_context(FakeEngine()), TEXT, {"prompt": "a", "temprature": 1}))
    assert error["param"] == "temprature"
    assert "Did you mean 'temperature'?" in error["message"]
    error = error_of(
        post(make_context(FakeEngine()), CHAT, {"messages": [USER], "\u00e9" * 500: 1})
    )
    assert len(error["message"]) < 300


REFUSED = {
    TEXT: ("suffix", "best_of", "guided_json", "structured_outputs", "truncate_prompt_tokens"),
    CHAT: ("functions", "audio", "response_format", "guided_regex", "web_search_options"),
}
BODIES: dict[str, dict[str, Any]] = {TEXT: {"prompt": "a"}, CHAT: {"messages": [USER]}}


@pytest.mark.parametrize(("path", "field"), [(p, f) for p in REFUSED for f in REFUSED[p]])
def test_fields_of_later_versions_are_refused_by_name(path: str, field: str) -> None:
    error = error_of(post(make_context(FakeEngine()), path, BODIES[path] | {field: {"a": 1}}))
    assert error["param"] == field
    assert error["message"].startswith(f"{field} is not supported: ")


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "response_format", {"type": "text"}),
        (CHAT, "response_format", None),
        (CHAT, "modalities", ["text"]),
        (CHAT, "function_call", "none"),
        (CHAT, "functions", []),
        (CHAT, "store", True),
        (CHAT, "metadata", {"a": "b"}),
        (CHAT, "parallel_tool_calls", True),
        (CHAT, "verbosity", "low"),
        (TEXT, "user", "me"),
        (TEXT, "suffix", None),
        (TEXT, "suffix", ""),
        (TEXT, "best_of", 1),
        (TEXT, "use_beam_search", False),
    ],
)
def test_harmless_values_are_accepted(path: str, field: str, value: object) -> None:
    response = post(make_context(FakeEngine()), path, BODIES[path] | {field: value})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, chat_params.CompletionCreateParamsBase.__annotations__),
        (TEXT, completion_params.CompletionCreateParamsBase.__annotations__),
    ],
)
def test_every_field_of_the_sdk_is_known(path: str, fields: dict[str, object]) -> None:
    """Taken, ignored or refused with a reason, never "unknown"."""
    for field in fields:
        response = post(make_context(FakeEngine()), path, {field: 5})
        assert "Unknown field" not in response.text, field


def test_unknown_model() -> None:
    for path, body in BODIES.items():
        error = error_of(post(make_context(FakeEngine()), path, body | {"model": "gpt-9"}), 404)
        assert error == {
            "message": "The model `gpt-9` does not exist.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }


def test_any_served_name_is_accepted_and_told_back() -> None:
    context = make_context(FakeEngine())
    assert post(context, TEXT, {"prompt": "a", "model": "alias"}).json()["model"] == "alias"
    assert post(context, TEXT, {"prompt": "a"}).json()["model"] == "tiny"


def test_stream_options_need_stream() -> None:
    body = {"prompt": "a", "stream_options": {"include_usage": True}}
    error = error_of(post(make_context(FakeEngine()), TEXT, body))
    assert error["message"] == "Stream options can only be defined when `stream=True`."


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_too_long_keeps_its_status_in_streams(stream: bool) -> None:
    body = {"prompt": "a" * 200, "stream": stream}
    assert error_of(post(make_context(FakeEngine()), TEXT, body))["param"] == "input_tokens"


def test_nul_bytes_are_text() -> None:
    engine = FakeEngine()
    assert post(make_context(engine), TEXT, {"prompt": "a\0b", "max_tokens": 1}).status_code == 200
    assert engine.calls[0].prompt == "a\0b"


def test_a_long_request_id_is_refused() -> None:
    """Every chunk would repeat it."""
    body = {"prompt": "a", "request_id": "x" * 257}
    error = error_of(post(make_context(FakeEngine()), TEXT, body))
    assert error["param"] == "request_id"
    assert error["message"] == "request_id must have at most 256 characters, got 257."


def test_unusable_request_ids_are_replaced() -> None:
    headers = JSON | {"x-request-id": "a b\x7f"}
    response = raw(json.dumps({"prompt": "a"}).encode(), headers)
    assert response.headers["x-request-id"] != "a b\x7f"
    assert response.json()["id"] == "cmpl-" + response.headers["x-request-id"]
    kept = raw(b'{"prompt": "a"}', JSON | {"x-request-id": "abc-1"})
    assert kept.headers["x-request-id"] == "abc-1"
    assert kept.json()["id"] == "cmpl-abc-1"
