"""/v1/chat/completions over an engine whose tokens are known."""

import asyncio
import threading
from typing import Any

import pytest
from tests.server.client import USER, client_of, events_of, make_context, post
from tests.server.fake_engine import FakeEngine

from moestro.chat.templates import ChatTemplate

PATH = "/v1/chat/completions"


def test_whole_answer() -> None:
    engine = FakeEngine()
    body = post(make_context(engine), PATH, {"messages": [USER], "max_tokens": 3}).json()
    assert engine.calls[0].prompt == "uhia"
    assert engine.calls[0].options["add_special_tokens"] is False
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "tiny"
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "bcd",
        "refusal": None,
    }
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3


def test_the_event_loop_does_not_wait_for_a_template() -> None:
    class Slow(ChatTemplate):
        """Ends once the event loop has gone on."""

        def render(self, *args: Any, **kwargs: Any) -> str:
            assert others_ran.wait(10)
            return "a"

    others_ran = threading.Event()
    context = make_context(FakeEngine(), chat_template=Slow(""))

    async def run() -> int:
        async with client_of(context) as client:
            body = {"messages": [USER], "max_tokens": 1}
            answer = asyncio.ensure_future(client.post(PATH, json=body))
            while not answer.done():
                await asyncio.sleep(0.01)
                others_ran.set()
            return (await answer).status_code

    assert asyncio.run(run()) == 200


def test_unset_max_tokens_is_what_the_context_leaves() -> None:
    engine = FakeEngine()
    post(make_context(engine), PATH, {"messages": [USER]})
    assert engine.calls[0].params.max_tokens is None


def test_unset_max_tokens_is_the_checkpoints() -> None:
    """As a default, capped to the context; what a client asks for itself is refused instead."""
    engine = FakeEngine()
    context = make_context(engine, default_max_tokens=7)
    post(context, PATH, {"messages": [USER]})
    post(context, PATH, {"messages": [USER], "max_tokens": 9})
    assert [c.params.max_tokens for c in engine.calls] == [7, 9]
    assert [c.options["strict_max_tokens"] for c in engine.calls] == [False, True]


def test_max_completion_tokens_wins() -> None:
    engine = FakeEngine()
    limits = {"max_tokens": 5, "max_completion_tokens": 2}
    post(make_context(engine), PATH, {"messages": [USER], **limits})
    assert engine.calls[0].params.max_tokens == 2


@pytest.mark.parametrize("n", [1, 2])
def test_stream_says_what_the_whole_answer_says(n: int) -> None:
    asked = {"messages": [USER], "max_tokens": 4, "n": n, "logprobs": True, "top_logprobs": 2}
    whole = post(make_context(FakeEngine()), PATH, asked).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events_of(post(make_context(FakeEngine()), PATH, asked | options).text)
    assert done == "[DONE]"
    assert usage["usage"] == whole["usage"]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        parts = [c for k in chunks for c in k["choices"] if c["index"] == choice["index"]]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in p["delta"] for p in parts[1:])
        assert "".join(p["delta"]["content"] for p in parts) == choice["message"]["content"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        told = [e for p in parts if p["logprobs"] for e in p["logprobs"]["content"]]
        assert told == choice["logprobs"]["content"]


def test_logprobs() -> None:
    asked = {"messages": [USER], "max_tokens": 1, "logprobs": True, "top_logprobs": 2}
    told = post(make_context(FakeEngine()), PATH, asked).json()["choices"][0]["logprobs"]
    assert told["content"] == [
        {
            "token": "b",
            "logprob": -3.0,
            "bytes": [98],
            "top_logprobs": [
                {"token": "x", "logprob": -1.0, "bytes": [120]},
                {"token": "y", "logprob": -2.0, "bytes": [121]},
            ],
        }
    ]


def test_logprobs_without_alternatives() -> None:
    asked = {"messages": [USER], "max_tokens": 1, "logprobs": True}
    told = post(make_context(FakeEngine()), PATH, asked).json()["choices"][0]["logprobs"]
    assert told["content"][0]["top_logprobs"] == []


def test_top_logprobs_need_logprobs() -> None:
    error = post(make_context(FakeEngine()), PATH, {"messages": [USER], "top_logprobs": 2}).json()
    assert error["error"]["param"] == "top_logprobs"


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([{"role": "developer", "content": "x"}, USER], "sxuhia"),
        ([{"role": "user", "content": [{"type": "text", "text": "h"}]}], "uha"),
        ([USER, {"role": "assistant", "content": "y", "refusal": None, "audio": None}], "uhiaya"),
    ],
)
def test_messages_reach_the_template(messages: list[object], prompt: str) -> None:
    engine = FakeEngine()
    assert post(make_context(engine), PATH, {"messages": messages}).status_code == 200
    assert engine.calls[0].prompt == prompt


def test_template_arguments() -> None:
    engine = FakeEngine()
    body = {
        "messages": [USER],
        "chat_template_kwargs": {"reasoning_effort": "high"},
        "reasoning_effort": "low",
        "add_generation_prompt": False,
    }
    post(make_context(engine), PATH, body)
    assert engine.calls[0].prompt == "uhihigh"


def test_continue_final_message() -> None:
    engine = FakeEngine()
    messages = [USER, {"role": "assistant", "content": "so"}]
    body = {"messages": messages, "continue_final_message": True}
    assert post(make_context(engine), PATH, body).status_code == 200
    assert engine.calls[0].prompt == "uhiaso"


def test_tools_are_shown_only_when_none_may_be_called() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    engine = FakeEngine()
    context = make_context(engine)
    taken = post(context, PATH, {"messages": [USER], "tools": tools, "tool_choice": "none"})
    assert taken.status_code == 200
    assert engine.calls[0].prompt == "uhilooka"
    for choice in (None, "auto", "required", {"type": "function", "function": {"name": "look"}}):
        refused = post(context, PATH, {"messages": [USER], "tools": tools, "tool_choice": choice})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "tools"
        assert "tool calling" in refused.json()["error"]["message"]
    assert post(context, PATH, {"messages": [USER], "tool_choice": "required"}).status_code == 400
    assert post(context, PATH, {"messages": [USER], "tool_choice": "auto"}).status_code == 200


def test_without_a_template_the_error_names_the_flag() -> None:
    context = make_context(FakeEngine(), chat_template=ChatTemplate(None))
    error = post(context, PATH, {"messages": [USER]})
    assert error.status_code == 400
    assert "--chat-template" in error.json()["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "owner", "content": "x"}], "body.messages.0.role"),
        ([{"role": "user", "content": "x", "colour": 1}], "body.messages.0.colour"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": 5}], "body.messages.0.content"),
        ("hello", "body.messages"),
    ],
)
def test_bad_messages(messages: object, param: str) -> None:
    response = post(make_context(FakeEngine()), PATH, {"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_lone_surrogates_of_a_template_do_not_break_the_answer() -> None:
    context = make_context(FakeEngine(), chat_template=ChatTemplate("{{ '\ud800'.nothing() }}"))
    response = post(context, PATH, {"messages": [USER]})
    assert response.status_code == 400
