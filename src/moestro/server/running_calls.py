"""The calls that clients wait for: each ends with its answer, its client's leaving, or ours."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from moestro.server.errors import UNAVAILABLE, ApiError, ClientGoneError

T = TypeVar("T")


class RunningCalls:
    """Runs the work of calls. on_gone: told when a client goes before it has its answer."""

    def __init__(self, on_gone: Callable[[], None]) -> None:
        self.on_gone = on_gone
        self._tasks: set[asyncio.Future[Any]] = set()
        self._stopped = False

    async def run(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the client goes, or by stop().

        The body must have been read. Raises ClientGoneError, and ApiError (503) after stop().
        """
        task = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(_client_gone(receive))
        self._tasks.add(task)
        if self._stopped:
            task.cancel()
        try:
            await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.on_gone()
                raise ClientGoneError
            if self._stopped and task.cancelled():
                raise ApiError("The server is shutting down.", status=503, kind=UNAVAILABLE)
            return task.result()
        finally:
            self._tasks.discard(task)
            await _end(task, watcher)

    def stop(self) -> None:
        """End what runs, and whatever comes: clients are told at once, not after a step."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()


async def _client_gone(receive: Receive) -> None:
    """Returns once the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
