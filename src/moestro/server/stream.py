"""Answers, whole or as server-sent events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moestro.server.errors import (
    ApiError,
    ClientGoneError,
    as_api_error,
    encode_json,
    error_body,
)
from moestro.server.running_calls import RunningCalls

_OPTIONAL = ("timing", "kv_hints")
"""Keys of an answer that are left out, not null, unless asked for."""
DONE = b"data: [DONE]\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Call(Protocol):
    """A request to a generating route, checked and ready to run."""

    async def whole(self) -> BaseModel:
        """The answer in one piece."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, without the final [DONE]."""


async def respond(request: Request, call: Call, streamed: bool) -> Response:
    """Run the call as one of the application's running calls."""
    calls: RunningCalls = request.app.state.calls
    if streamed:
        return await _open_stream(request, call.events(), calls)
    answer = await calls.run(request.receive, call.whole())
    absent = {name for name in _OPTIONAL if getattr(answer, name, None) is None}
    return Response(answer.model_dump_json(exclude=absent), media_type="application/json")


def event(chunk: BaseModel) -> bytes:
    """One chunk as an event; only what was set is sent."""
    return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"


def error_event(error: Exception) -> bytes:
    """An error after the headers: the envelope as an event."""
    return b"data: " + encode_json(error_body(as_api_error(error))) + b"\n\n"


class EventStream(Response):
    """Sends events until they end or the client goes; then the generator is closed.

    An exception of the generator, and the server's stopping, become an error event; [DONE] ends
    every stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], calls: RunningCalls
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)
        self._first = first
        self._events = events
        self._calls = calls

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send everything; returns quietly when the client goes."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            try:
                await self._calls.run(receive, self._send_all(send))
            except ApiError as error:  # only of the call as a whole: the server stops
                last = error_event(error) + DONE
                await send({"type": "http.response.body", "body": last, "more_body": False})
        except ClientGoneError:
            pass
        except OSError:  # the connection broke while it was written to
            self._calls.on_gone()
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        async def write(part: bytes) -> None:
            await send({"type": "http.response.body", "body": part, "more_body": True})

        try:
            await write(self._first)
            async with aclosing(self._events) as events:
                async for part in events:
                    await write(part)
        except OSError:
            raise
        except Exception as error:
            await write(error_event(error))
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def _open_stream(
    request: Request, events: AsyncGenerator[bytes, None], calls: RunningCalls
) -> Response:
    """A response for events, once there is the first: until then errors keep their status."""
    try:
        first = await calls.run(request.receive, _first_of(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, calls)


async def _first_of(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)
