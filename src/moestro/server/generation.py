"""Running requests on the engine for one HTTP call: measured, merged, aborted when nobody reads."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from moestro.core.kv_hints import KVHints
from moestro.core.outputs import CompletionOutput, RequestOutput
from moestro.core.request import FinishReason
from moestro.core.sampling_params import SamplingParams
from moestro.engine.input_processor import Prompt
from moestro.metrics import FinishedRequest, ServerMetrics
from moestro.server.engine_client import ServerContext
from moestro.server.errors import INTERNAL, ApiError, sanitise


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt of a call, as the engine gets it.

    strict_max_tokens: the client chose max_tokens, so one beyond the context is an error.
    """

    prompt: Prompt
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    kv_hints: KVHints | None = None
    add_special_tokens: bool = True
    strict_max_tokens: bool = False


@dataclass(slots=True)
class SequenceCursor:
    """How much of a sequence has been passed on already."""

    num_chars: int = 0
    num_tokens: int = 0
    started: bool = False
    finished: bool = False

    def advance(self, output: CompletionOutput) -> "Addition":
        """What the output holds beyond the last call."""
        added = Addition(
            text=output.text[self.num_chars :],
            first_token=self.num_tokens,
            num_tokens=len(output.token_ids) - self.num_tokens,
            finishes=output.finish_reason is not None and not self.finished,
        )
        self.num_chars = len(output.text)
        self.num_tokens = len(output.token_ids)
        self.finished = output.finish_reason is not None
        return added


@dataclass(frozen=True, slots=True)
class Addition:
    """New text and new tokens [first_token, first_token + num_tokens) of a sequence."""

    text: str
    first_token: int
    num_tokens: int
    finishes: bool

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.num_tokens or self.finishes)


@dataclass(slots=True)
class _Meter:
    """Times of one request as its client sees them."""

    metrics: ServerMetrics
    params: SamplingParams
    arrival: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None
    counts: dict[int, int] = field(default_factory=dict)
    last_of: dict[int, float] = field(default_factory=dict)

    def saw(self, output: RequestOutput) -> None:
        """Note the tokens that this output adds."""
        now = time.monotonic()
        for sequence in output.outputs:
            count = len(sequence.token_ids)
            if count == self.counts.get(sequence.index, 0):
                continue
            self.counts[sequence.index] = count
            if self.first is None:
                self.first = now
                self.metrics.observe_first_token(now - self.arrival)
            before = self.last_of.get(sequence.index)
            if before is not None:
                self.metrics.observe_token_gap(now - before)
            self.last_of[sequence.index] = self.last = now

    def finish(self, output: RequestOutput | None) -> None:
        """Record the request; sequences that did not end were aborted."""
        reasons = ["abort"] * self.params.n
        for sequence in output.outputs if output is not None else ():
            if sequence.finish_reason is not None and sequence.index < len(reasons):
                reasons[sequence.index] = str(sequence.finish_reason)
        self.metrics.observe_finished(
            FinishedRequest(
                finish_reasons=tuple(reasons),
                num_prompt_tokens=len(output.prompt_token_ids) if output is not None else 0,
                num_generation_tokens=sum(self.counts.values()),
                n=self.params.n,
                max_tokens=self.params.max_tokens,
                e2e_s=time.monotonic() - self.arrival,
                first_token_s=None if self.first is None else self.first - self.arrival,
                last_token_s=None if self.last is None else self.last - self.arrival,
            )
        )


async def run_job(
    context: ServerContext, job: Job, request_id: str
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of one job. Closing it early aborts the request.

    request_id gets a suffix of its own: clients may send one id twice. Raises RequestError,
    CapacityError, EngineDeadError, and ApiError for a sequence that failed.
    """
    meter = _Meter(context.metrics, job.params)
    engine_id = f"{request_id}-{uuid.uuid4().hex[:8]}"
    output: RequestOutput | None = None
    outputs = context.engine.generate(
        job.prompt,
        job.params,
        engine_id,
        priority=job.priority,
        cache_salt=job.cache_salt,
        kv_hints=job.kv_hints,
        add_special_tokens=job.add_special_tokens,
        strict_max_tokens=job.strict_max_tokens,
    )
    accepted = False
    try:
        async with aclosing(outputs) as stream:
            async for output in stream:
                accepted = True
                meter.saw(output)
                _check_failed(output)
                yield output
    except (GeneratorExit, asyncio.CancelledError):
        accepted = True
        raise
    finally:
        if accepted:
            meter.finish(output)


def _check_failed(output: RequestOutput) -> None:
    """The engine puts what went wrong into stop_reason."""
    for sequence in output.outputs:
        if sequence.finish_reason is FinishReason.ERROR:
            why = str(sequence.stop_reason or "generation failed")
            raise ApiError(sanitise(why), status=500, kind=INTERNAL)


async def run_jobs(
    context: ServerContext, jobs: Sequence[Job], request_id: str
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(index of the job, output) of all jobs as they come. An error in one ends all.

    A job goes on once its output has been dealt with: a slow client finds its tokens added up, not
    queued, and no output changes under its reader.
    """
    if len(jobs) == 1:
        async with aclosing(run_job(context, jobs[0], request_id)) as stream:
            async for output in stream:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue()

    async def pump(index: int) -> None:
        try:
            async with aclosing(run_job(context, jobs[index], f"{request_id}-{index}")) as stream:
                async for output in stream:
                    queue.put_nowait((index, output))
                    await queue.join()
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(i)) for i in range(len(jobs))]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
            queue.task_done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
