"""Running the application on a socket until a signal ends it."""

import asyncio
import contextlib
import logging
import math
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class DrainingServer(uvicorn.Server):
    """Ends in two stages: the first signal drains, the second stops at once.

    Draining: no new connections, running requests finish within the shutdown timeout, what is
    left then is aborted. Unlike its parent it does not raise the signal again when it is done:
    having been asked to stop is no failure.
    """

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


async def run_app(app: FastAPI, sock: socket.socket, shutdown_timeout_s: float) -> bool:
    """Serve until a signal. True when everything was drained, False when it was cut short."""
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=math.ceil(shutdown_timeout_s),
    )
    server = DrainingServer(config)
    await server.serve(sockets=[sock])
    if server.force_exit:
        await _cancel_rest()
    return not server.force_exit


async def _cancel_rest() -> None:
    """End the tasks of requests that were still running, so that each aborts what it asked for."""
    own = asyncio.current_task()
    rest = [task for task in asyncio.all_tasks() if task is not own]
    for task in rest:
        task.cancel()
    await asyncio.wait(rest, timeout=1.0) if rest else None
