"""Between the thread that reads the engine's reports and the tasks that wait for them."""

import asyncio
import threading
from dataclasses import dataclass, field

from moestro.core.messages import EngineStats, SequenceDelta, StepReport
from moestro.core.outputs import Logprob
from moestro.errors import EngineDeadError, RequestError, shown


@dataclass(slots=True)
class _Coalesced:
    """Several deltas of one sequence, added up."""

    last: SequenceDelta
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    num_cached_tokens: int = 0

    def add(self, delta: SequenceDelta) -> None:
        self.last = delta
        self.token_ids += delta.token_ids
        self.text.append(delta.text)
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)

    def result(self) -> SequenceDelta:
        return SequenceDelta(
            self.last.request_id,
            self.last.index,
            tuple(self.token_ids),
            "".join(self.text),
            tuple(self.logprobs),
            tuple(self.prompt_logprobs),
            self.num_cached_tokens,
            self.last.finish_reason,
            self.last.stop_reason,
            self.last.error,
            self.last.timing,
            self.last.hint_answer,
        )


class RequestStream:
    """Deltas of one request on their way to one task; what isn't taken in time adds up to one.

    So a slow reader costs as much memory as its output, never a queue of reports.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._waiting: dict[int, _Coalesced] = {}
        self._failure: str | None = None

    def put(self, delta: SequenceDelta) -> None:
        """Add a delta and wake the reader. From any thread."""
        with self._lock:
            first = not self._waiting
            if delta.index not in self._waiting:
                self._waiting[delta.index] = _Coalesced(delta)
            self._waiting[delta.index].add(delta)
        if first:
            self._wake()

    def fail(self, message: str) -> None:
        """Make every take() from now on raise EngineDeadError. From any thread."""
        with self._lock:
            self._failure = message
        self._wake()

    async def take(self) -> list[SequenceDelta]:
        """Wait for deltas and take them, one a sequence. Raises EngineDeadError."""
        await self._ready.wait()
        with self._lock:
            if self._failure is None:
                self._ready.clear()
            taken, self._waiting = self._waiting, {}
        if not taken and self._failure is not None:
            raise EngineDeadError(self._failure)
        return [c.result() for c in taken.values()]

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:  # the reader's event loop is closed: nobody waits any more
            return


class StreamHub:
    """All open streams of an engine, by request id; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[str, RequestStream] = {}
        self._failure: str | None = None
        self.stats = EngineStats()

    @property
    def failure(self) -> str | None:
        """Why the engine is dead, or None while it lives."""
        return self._failure

    def open(self, request_id: str, stream: RequestStream) -> None:
        """Raises RequestError when the id is in use, EngineDeadError when the engine is dead."""
        with self._lock:
            if self._failure is not None:
                raise EngineDeadError(self._failure)
            if request_id in self._streams:
                raise RequestError(
                    f"The request id {shown(request_id)} is in use: ids must be unique.",
                    "request_id",
                )
            self._streams[request_id] = stream

    def drop(self, request_id: str) -> None:
        """Forget a stream; what still comes for it is dropped."""
        with self._lock:
            self._streams.pop(request_id, None)

    def deliver(self, report: StepReport) -> None:
        """Hand a report's deltas to their streams."""
        self.stats = report.stats
        for delta in report.deltas:
            with self._lock:
                stream = self._streams.get(delta.request_id)
            if stream is not None:
                stream.put(delta)

    def fail(self, message: str) -> None:
        """The engine is gone: everybody who waits gets EngineDeadError."""
        with self._lock:
            self._failure = self._failure or message
            streams = tuple(self._streams.values())
        for stream in streams:
            stream.fail(message)
