"""Answers, whole or as server-sent events, and noticing that a client has gone meanwhile."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moestro.server.errors import ClientGoneError, as_api_error, encode_json, error_body

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Call(Protocol):
    """A request to a generating route, checked and ready to run."""

    async def whole(self) -> BaseModel:
        """The answer in one piece."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, without the final [DONE]."""


async def respond(
    request: Request, call: Call, streamed: bool, on_gone: Callable[[], None]
) -> Response:
    """Run the call. on_gone: told when the client goes before it has its answer."""
    if streamed:
        return await open_stream(request, call.events(), on_gone)
    answer = await unless_gone(request.receive, call.whole(), on_gone)
    return Response(answer.model_dump_json(), media_type="application/json")


def event(chunk: BaseModel) -> bytes:
    """One chunk as an event; only what was set is sent."""
    return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"


def error_event(error: Exception) -> bytes:
    """An error after the headers: the envelope as an event."""
    return b"data: " + encode_json(error_body(as_api_error(error))) + b"\n\n"


async def client_gone(receive: Receive) -> None:
    """Returns once the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(
    receive: Receive, work: Coroutine[Any, Any, T], on_gone: Callable[[], None]
) -> T:
    """The result of `work`, which is cancelled when the client goes. Raises ClientGoneError."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(client_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            on_gone()
            raise ClientGoneError
        return task.result()
    finally:
        await _end(task, watcher)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Sends events until they end or the client goes; then the generator is closed.

    An exception of the generator becomes an error event; [DONE] ends every stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], on_gone: Callable[[], None]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)
        self._first = first
        self._events = events
        self._on_gone = on_gone

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send everything; returns quietly when the client goes."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            await unless_gone(receive, self._send_all(send), self._on_gone)
        except ClientGoneError:
            pass
        except OSError:  # the connection broke while it was written to
            self._on_gone()
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


async def open_stream(
    request: Request, events: AsyncGenerator[bytes, None], on_gone: Callable[[], None]
) -> Response:
    """A response for events, once there is the first: until then errors keep their status."""
    try:
        first = await unless_gone(request.receive, _first_of(events), on_gone)
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, on_gone)


async def _first_of(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)
