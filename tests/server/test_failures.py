"""What goes wrong after a request was accepted: engine failures, bugs, clients that leave."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message
from tests.server.client import USER, events_of, make_context, metric, post
from tests.server.fake_engine import FakeEngine

from moestro.errors import CapacityError, EngineDeadError, UnsupportedError
from moestro.server.app import create_app
from moestro.server.engine_client import ServerContext
from moestro.server.errors import as_api_error, sanitise

TEXT = "/v1/completions"


def test_dead_engine_answers_500_in_the_envelope() -> None:
    response = post(make_context(FakeEngine(fail_after=2)), TEXT, {"prompt": "a"})
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["type"] == "InternalServerError"
    assert error["code"] == 500
    assert "boom" in error["message"]
    assert "/home" not in error["message"]


def test_failure_inside_a_stream_is_an_event_and_then_done() -> None:
    body = {"prompt": "a", "stream": True}
    response = post(make_context(FakeEngine(fail_after=2)), TEXT, body)
    assert response.status_code == 200
    one, two, failure, done = events_of(response.text)
    assert one["choices"][0]["text"] + two["choices"][0]["text"] == "bc"
    assert failure["error"]["code"] == 500
    assert done == "[DONE]"


def test_failure_before_the_first_token_keeps_its_status() -> None:
    body = {"prompt": "a", "stream": True}
    assert post(make_context(FakeEngine(fail_after=0)), TEXT, body).status_code == 500


def test_a_bug_is_a_500_without_its_insides(caplog: pytest.LogCaptureFixture) -> None:
    response = post(make_context(FakeEngine(error_after=0)), TEXT, {"prompt": "a"})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "kaput at <address>"
    assert "kaput" in caplog.text


def test_an_error_of_one_prompt_ends_the_others() -> None:
    engine = FakeEngine()
    response = post(make_context(engine), TEXT, {"prompt": ["abc", "a" * 200], "max_tokens": 50})
    assert response.status_code == 400
    assert engine.calls[0].aborted


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CapacityError("full"), 400),
        (UnsupportedError("no"), 501),
        (EngineDeadError("dead"), 500),
        (KeyError("x"), 500),
    ],
)
def test_status_of_errors(error: Exception, status: int) -> None:
    assert as_api_error(error).status == status


def test_sanitise() -> None:
    dirty = "bad at 0x7fab01 in /usr/lib/x.py\nTraceback (most recent call last):\n  secret"
    assert sanitise(dirty) == "bad at <address> in <path>"
    assert sanitise("see http://host/a/b and 1/2") == "see http://host/a/b and 1/2"


class Visitor:
    """One raw ASGI call whose client leaves when told to."""

    def __init__(self, context: ServerContext, body: bytes, path: str = TEXT) -> None:
        self.app = create_app(context)
        self.leave = asyncio.Event()
        self.sent: list[Message] = []
        self._body: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("1.2.3.4", 5),
            "server": ("test", 80),
        }

    async def run(self, on_send: Callable[[Message], Awaitable[None]] | None = None) -> None:
        """Until the application is done with the call."""

        async def receive() -> Message:
            if self._body:
                return self._body.pop()
            await self.leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            self.sent.append(message)
            if on_send is not None:
                await on_send(message)

        await asyncio.wait_for(self.app(self._scope, receive, send), 30)


STREAM = b'{"prompt": "abc", "max_tokens": 90, "stream": true}'


def test_a_client_that_leaves_mid_stream_aborts_its_request() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        context = make_context(engine)
        visitor = Visitor(context, STREAM)

        async def after_three(message: Message) -> None:
            if len(visitor.sent) == 4:
                assert engine.gate is None
                engine.gate = asyncio.Event()
                visitor.leave.set()

        await visitor.run(after_three)
        assert engine.calls[0].aborted
        assert engine.calls[0].num_yielded < 10
        assert (
            metric(context, 'moestro:client_disconnects_total{engine="0",model_name="tiny"}') == 1
        )
        labels = '{engine="0",finished_reason="abort",model_name="tiny"}'
        assert metric(context, f"vllm:request_success_total{labels}") == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize("prompt", [b'"abc"', b'["abc", "x", "y"]'])
def test_a_client_that_leaves_before_the_first_token(stream: bytes, prompt: bytes) -> None:
    async def scenario() -> None:
        engine = FakeEngine(gate=asyncio.Event())
        body = b'{"prompt": %s, "max_tokens": 9, "stream": %s}' % (prompt, stream)
        visitor = Visitor(make_context(engine), body)
        task = asyncio.create_task(visitor.run())
        while len(engine.calls) < prompt.count(b'"') // 2:
            await asyncio.sleep(0)
        visitor.leave.set()
        await task
        assert all(c.aborted for c in engine.calls)

    asyncio.run(scenario())


def test_a_client_that_leaves_while_it_sends() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        visitor = Visitor(make_context(engine), b"")
        visitor._body = []
        visitor.leave.set()
        await visitor.run()
        assert engine.calls == []

    asyncio.run(scenario())


def test_a_broken_connection_aborts() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        visitor = Visitor(make_context(engine), STREAM)

        async def break_off(message: Message) -> None:
            if len(visitor.sent) == 3:
                raise OSError("connection reset")

        await visitor.run(break_off)
        assert engine.calls[0].aborted

    asyncio.run(scenario())


def test_a_cancelled_call_aborts() -> None:
    """What the server does to calls that outlast the shutdown timeout."""

    async def scenario() -> None:
        engine = FakeEngine(gate=asyncio.Event())
        body = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
        visitor = Visitor(make_context(engine), body, "/v1/chat/completions")
        task = asyncio.create_task(visitor.run())
        while not engine.calls:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.calls[0].aborted

    asyncio.run(scenario())


def test_chat_stream_failure_is_an_event() -> None:
    body = {"messages": [USER], "stream": True}
    response = post(make_context(FakeEngine(fail_after=1)), "/v1/chat/completions", body)
    assert events_of(response.text)[-2]["error"]["type"] == "InternalServerError"


SHUT = {
    "error": {
        "message": "The server is shutting down.",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
}


@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize("prompt", [b'"abc"', b'["abc", "x"]'])
def test_a_stop_before_the_first_token_is_a_503(stream: bytes, prompt: bytes) -> None:
    async def scenario() -> None:
        engine = FakeEngine(gate=asyncio.Event())
        body = b'{"prompt": %s, "max_tokens": 9, "stream": %s}' % (prompt, stream)
        visitor = Visitor(make_context(engine), body)
        task = asyncio.create_task(visitor.run())
        while len(engine.calls) < prompt.count(b'"') // 2:
            await asyncio.sleep(0)
        visitor.app.state.calls.stop()
        await task
        assert visitor.sent[0]["status"] == 503
        assert json.loads(visitor.sent[1]["body"]) == SHUT
        assert all(c.aborted for c in engine.calls)

        late = Visitor(make_context(engine), body)
        late.app.state.calls.stop()
        await late.run()
        assert late.sent[0]["status"] == 503

    asyncio.run(scenario())


def test_a_stop_in_a_stream_is_an_error_event() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        visitor = Visitor(make_context(engine), STREAM)

        async def after_three(message: Message) -> None:
            if len(visitor.sent) == 4:
                engine.gate = asyncio.Event()
                visitor.app.state.calls.stop()

        await visitor.run(after_three)
        last = visitor.sent[-1]
        assert last["more_body"] is False
        assert events_of(last["body"].decode()) == [SHUT, "[DONE]"]
        assert all(m["more_body"] for m in visitor.sent[1:-1])
        assert engine.calls[0].aborted

    asyncio.run(scenario())
