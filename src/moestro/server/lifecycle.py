"""Running the application on a socket until a signal ends it."""

import asyncio
import contextlib
import logging
import math
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from moestro.server.running_calls import RunningCalls

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TELL_TIMEOUT_S = 5
"""For clients to read that they were aborted; who reads too slowly is cut off."""
_LAST_WORDS_TIMEOUT_S = 1.0
"""The same after a second signal."""


class DrainingServer(uvicorn.Server):
    """Ends in two stages: the first signal drains, the second stops at once.

    Draining: no new connections, running requests finish. What still runs after
    `shutdown_timeout_s` is aborted by `abort`, which tells each client that its answer is cut.
    Unlike its parent it does not raise the signal again when it is done: having been asked to
    stop is no failure. on_started: called once signals are handled and connections taken.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        shutdown_timeout_s: float,
        on_started: Callable[[], None],
        abort: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(config)
        self._shutdown_timeout_s = shutdown_timeout_s
        self._on_started = on_started
        self._abort = abort

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections."""
        await super().startup(sockets=sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain."""
        timer = asyncio.ensure_future(self._abort_in_time())
        try:
            await super().shutdown(sockets=sockets)
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM while the server runs, in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """First call: drain. Second: stop."""
        if self.should_exit:
            logger.info("%s again: stopping at once", signal.Signals(sig).name)
            self.force_exit = True
            return
        logger.info("%s: finishing running requests, then stopping", signal.Signals(sig).name)
        self.should_exit = True

    async def _abort_in_time(self) -> None:
        await asyncio.sleep(self._shutdown_timeout_s)
        logger.warning(
            "aborting what did not finish within shutdown_timeout=%g s", self._shutdown_timeout_s
        )
        await self._abort()


async def run_app(
    app: FastAPI,
    sock: socket.socket,
    shutdown_timeout_s: float,
    on_started: Callable[[], None],
    abort: Callable[[], Awaitable[None]],
) -> bool:
    """Serve until a signal. True unless a second one cut it short.

    abort: ends the engine's work, once the clients of it have been told.
    """
    calls: RunningCalls = app.state.calls

    async def tell_and_abort() -> None:
        calls.stop()
        await abort()

    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=math.ceil(shutdown_timeout_s) + _TELL_TIMEOUT_S,
    )
    server = DrainingServer(config, shutdown_timeout_s, on_started, tell_and_abort)
    errors = logging.getLogger("uvicorn.error")
    errors.addFilter(_is_no_cancellation)
    try:
        await server.serve(sockets=[sock])
        if server.force_exit:
            calls.stop()
            await _end_rest()
    finally:
        errors.removeFilter(_is_no_cancellation)
    return not server.force_exit


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """uvicorn logs a traceback for every request that ends because it is cancelled."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


async def _end_rest() -> None:
    """Let calls that were stopped write their last words, then end what did not get to it."""
    own = asyncio.current_task()
    rest = {task for task in asyncio.all_tasks() if task is not own}
    if rest:
        _, rest = await asyncio.wait(rest, timeout=_LAST_WORDS_TIMEOUT_S)
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=_LAST_WORDS_TIMEOUT_S)
