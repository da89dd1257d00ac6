"""Hints and questions on their way to the engine thread, and their answers on the way back."""

import asyncio
import itertools
import threading

from moestro.core.kv_hints import HintAnswer, HintRequest, PrefixUse
from moestro.core.messages import Channel, ExplainPrefix, KVAnswer, KVCommand
from moestro.errors import EngineDeadError, RequestError

_Waiting = tuple[asyncio.AbstractEventLoop, "asyncio.Future[HintAnswer | PrefixUse]"]


class CommandAnswers:
    """The commands nobody has answered yet; thread-safe. One instance an engine."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._failure: str | None = None

    async def ask(
        self, channel: Channel, command: HintRequest | ExplainPrefix
    ) -> HintAnswer | PrefixUse:
        """Send a command and wait for its answer, which comes between two steps.

        Raises RequestError when the engine refuses to answer, EngineDeadError.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[HintAnswer | PrefixUse] = loop.create_future()
        command_id = next(self._ids)
        with self._lock:
            if self._failure is not None:
                raise EngineDeadError(self._failure)
            self._waiting[command_id] = (loop, future)
        try:
            channel.send(KVCommand(command_id, command))
            return await future
        except BrokenPipeError:
            raise EngineDeadError(self._failure or "The engine has stopped.") from None
        finally:
            with self._lock:
                self._waiting.pop(command_id, None)

    def deliver(self, message: KVAnswer) -> None:
        """Hand an answer to who asked; dropped when nobody waits any more. From any thread."""
        with self._lock:
            waiting = self._waiting.pop(message.command_id, None)
        if waiting is None:
            return
        if message.answer is not None:
            _settle(*waiting, message.answer)
        else:
            _settle(*waiting, RequestError(message.error or "The engine gave no answer."))

    def fail(self, message: str) -> None:
        """The engine is gone: everybody who waits gets EngineDeadError. From any thread."""
        with self._lock:
            self._failure = self._failure or message
            waiting, self._waiting = tuple(self._waiting.values()), {}
        for loop, future in waiting:
            _settle(loop, future, EngineDeadError(message))


def _settle(
    loop: asyncio.AbstractEventLoop,
    future: "asyncio.Future[HintAnswer | PrefixUse]",
    outcome: HintAnswer | PrefixUse | Exception,
) -> None:
    def settle() -> None:
        if future.done():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:  # the asker's event loop is closed: nobody waits any more
        return
