"""AsyncEngine: the engine on a thread of its own, requests as asynchronous iterators.

Engine and caller share nothing but a Channel of frozen messages.
"""

import asyncio
import contextlib
import itertools
import logging
import threading
import weakref
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

from moestro.config import EngineConfig
from moestro.core.kv_hints import (
    HintAction,
    HintAnswer,
    HintRequest,
    KVHints,
    PrefixUse,
    check_cache_salt,
)
from moestro.core.messages import (
    AbortRequest,
    AddRequest,
    Channel,
    EngineFailed,
    EngineStats,
    ExplainPrefix,
    KVAnswer,
    Shutdown,
    StepReport,
)
from moestro.core.outputs import RequestOutput
from moestro.core.request import Request
from moestro.core.sampling_params import SamplingParams
from moestro.engine.built_engine import BuiltEngine
from moestro.engine.channel import channel_pair
from moestro.engine.command_answers import CommandAnswers
from moestro.engine.engine_loop import run_engine_loop
from moestro.engine.input_processor import Prompt, RequestOptions
from moestro.engine.request_progress import RequestProgress
from moestro.engine.request_stream import RequestStream, StreamHub
from moestro.engine.tokenizer import LONG_TEXT_CHARS, Tokenizer
from moestro.errors import EngineDeadError

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 60.0


class AsyncEngine:
    """Many requests at once from asyncio code. Its methods are for event-loop threads.

    Close it (or use it as an asynchronous context manager); one that is dropped stops its
    threads by itself.
    """

    def __init__(
        self, built: BuiltEngine, on_report: Callable[[StepReport], None] | None = None
    ) -> None:
        """on_report: called with every report, on the thread that reads them (metrics)."""
        self.config = built.config
        self.spec = built.spec
        self.plan = built.plan
        self.chat_template = built.chat_template
        self.default_params = built.processor.default_params
        self.default_max_tokens = built.processor.default_max_tokens
        self._processor = built.processor
        self._hub = StreamHub()
        self._answers = CommandAnswers()
        self._ids = itertools.count()
        self._closing = False
        self._channel, theirs = channel_pair()
        self._threads = (
            threading.Thread(
                target=run_engine_loop,
                args=(built.engine, theirs),
                name="moestro-engine",
                daemon=True,
            ),
            threading.Thread(
                target=_read_reports,
                args=(self._channel, self._hub, self._answers, on_report),
                name="moestro-reports",
                daemon=True,
            ),
        )
        for thread in self._threads:
            thread.start()
        # At exit too: a daemon thread inside a kernel while the interpreter goes would crash.
        self._stop = weakref.finalize(self, _stop_threads, self._channel, self._threads)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        progress: Callable[[int, int], None] | None = None,
        graph_progress: Callable[[int, int], None] | None = None,
        on_report: Callable[[StepReport], None] | None = None,
    ) -> "AsyncEngine":
        """Load the model and start. progress: (bytes read, bytes in all) while weights load;
        graph_progress: (batch sizes captured, in all) afterwards.
        """
        from moestro.engine.build import build_engine  # imports torch

        return cls(build_engine(config, progress, graph_progress), on_report)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._processor.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self._processor.limits.context

    @property
    def stats(self) -> EngineStats:
        """As of the last step."""
        return self._hub.stats

    @property
    def is_dead(self) -> bool:
        """True once the loop has failed or been closed: nothing will be answered any more."""
        return self._hub.failure is not None

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        kv_hints: KVHints | None = None,
        add_special_tokens: bool = True,
        strict_max_tokens: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """All that there is so far, each time something was added; the last one is finished.

        The lists in an output grow when the next one is asked for: copy what must stay as it is.
        Closing the iterator, or cancelling the task, aborts the request. params None: the
        checkpoint's defaults. kv_hints: what to do with its KV; answered in the last output's
        kv_hints. strict_max_tokens: refuse max_tokens beyond the context instead of
        capping it. Raises RequestError, and EngineDeadError when the engine stops underneath.
        """
        if self._closing:
            raise EngineDeadError("The engine is shutting down.")
        submission = self._processor.next_submission()
        options = RequestOptions(priority, cache_salt, kv_hints)

        def process() -> Request:
            return self._processor.process(
                prompt,
                params,
                request_id=f"request-{next(self._ids)}" if request_id is None else request_id,
                submission=submission,
                options=options,
                add_special_tokens=add_special_tokens,
                strict_max_tokens=strict_max_tokens,
            )

        request = await _in_thread_if_long(prompt, process)
        stream = RequestStream(asyncio.get_running_loop())
        self._hub.open(request.request_id, stream)
        progress = RequestProgress(request)
        try:
            self._send(AddRequest(request))
            while not progress.finished:
                for delta in await stream.take():
                    progress.add(delta)
                yield progress.output()
        finally:
            self._hub.drop(request.request_id)
            if not progress.finished:
                with contextlib.suppress(EngineDeadError):
                    self._send(AbortRequest(request.request_id))

    def abort(self, request_id: str) -> None:
        """End a request; its iterator yields what there is, with finish_reason abort."""
        with contextlib.suppress(EngineDeadError):
            self._send(AbortRequest(request_id))

    async def hint(
        self,
        action: HintAction,
        prompt: Prompt | None = None,
        *,
        session_id: str | None = None,
        ttl_s: float | None = None,
        cache_salt: str = "",
        add_special_tokens: bool = True,
    ) -> HintAnswer:
        """Pin, prefetch, demote or drop the KV of a session, or of a prompt (one of both).

        The answer says what was accepted, clipped or refused, and comes between two steps.
        Raises RequestError for what no engine could do, EngineDeadError.
        """
        token_ids = None
        if prompt is not None:
            token_ids = await self._tokens_of(prompt, add_special_tokens)
        request = HintRequest(
            action=action,
            session_id=session_id,
            token_ids=token_ids,
            cache_salt=cache_salt,
            ttl_s=ttl_s,
        )
        answer = await self._answers.ask(self._channel, request)
        assert isinstance(answer, HintAnswer)
        return answer

    async def explain(
        self, prompt: Prompt, *, cache_salt: str = "", add_special_tokens: bool = True
    ) -> tuple[int, PrefixUse]:
        """A prompt's tokens, and what it would find in the cache now. Changes nothing.

        Raises RequestError and EngineDeadError.
        """
        check_cache_salt(cache_salt)
        token_ids = await self._tokens_of(prompt, add_special_tokens)
        found = await self._answers.ask(self._channel, ExplainPrefix(token_ids, cache_salt))
        assert isinstance(found, PrefixUse)
        return len(token_ids), found

    async def _tokens_of(self, prompt: Prompt, add_special_tokens: bool) -> tuple[int, ...]:
        def read() -> tuple[int, ...]:
            return self._processor.tokens_of(prompt, add_special_tokens)[1]

        return await _in_thread_if_long(prompt, read)

    async def close(self, drain: bool = True) -> None:
        """Stop: after the requests in flight (drain), or now with them aborted. Repeatable."""
        self._closing = True
        with contextlib.suppress(EngineDeadError):
            self._send(Shutdown(drain))
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._stop.detach()

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self.close(drain=kind is None)

    def _send(self, message: object) -> None:
        try:
            self._channel.send(message)
        except BrokenPipeError:
            raise EngineDeadError(self._hub.failure or "The engine has stopped.") from None


_R = TypeVar("_R")


async def _in_thread_if_long(prompt: Prompt, read: Callable[[], _R]) -> _R:
    """Tokenise beside the event loop what would hold it up."""
    if _text_length(prompt) > LONG_TEXT_CHARS:
        return await asyncio.to_thread(read)
    return read()


def _text_length(prompt: Any) -> int:
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    return len(text) if isinstance(text, str) else 0


def _read_reports(
    channel: Channel,
    hub: StreamHub,
    answers: CommandAnswers,
    on_report: Callable[[StepReport], None] | None,
) -> None:
    """Hand reports to their streams, and answers to who asked, until the channel ends."""
    failure = "The engine has stopped."
    try:
        while True:
            event = channel.receive()
            if isinstance(event, StepReport):
                # first, so that metrics never lag behind what a client has seen
                if on_report is not None:
                    on_report(event)
                hub.deliver(event)
            elif isinstance(event, KVAnswer):
                answers.deliver(event)
            elif isinstance(event, EngineFailed):
                failure = f"The engine has failed: {event.message}"
    except EOFError:
        logger.debug("the engine's channel has ended")
    except Exception as error:
        logger.exception("reading the engine's reports failed")
        failure = f"Reading the engine's reports failed: {error}"
        channel.close()
    finally:
        hub.fail(failure)
        answers.fail(failure)


def _stop_threads(channel: Channel, threads: tuple[threading.Thread, ...]) -> None:
    channel.close()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT_S)
