"""POST /v1/completions."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from starlette.responses import Response

from moestro.core.outputs import CompletionOutput, RequestOutput
from moestro.server.body import parse_body
from moestro.server.engine_client import ServerContext
from moestro.server.errors import ApiError
from moestro.server.generation import Job, SequenceCursor, run_jobs
from moestro.server.openai.completion_protocol import (
    MAX_PROMPTS,
    RULES,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from moestro.server.openai.fields import check_model, public_id
from moestro.server.openai.kv import end_of_answer
from moestro.server.openai.logprobs import Position, completion_logprobs, prompt_logprobs
from moestro.server.openai.usage import UsageCounter
from moestro.server.stream import event, respond


async def create_completion(request: Request) -> Response:
    """Text completion of one or several prompts, whole or streamed."""
    context: ServerContext = request.app.state.context
    body = await parse_body(request, CompletionRequest, RULES, context.max_body_bytes)
    call = _Call.of(context, body, request.scope.get("request_id"))
    return await respond(request, call, bool(body.stream))


@dataclass(slots=True)
class _Echo:
    """What precedes the model's own text when the prompt is echoed."""

    text: str = ""
    token_ids: Sequence[int] = ()
    positions: Sequence[Position | None] = ()


@dataclass(slots=True)
class _Call:
    """One call: its jobs, and how outputs become choices. Choice = prompt index * n + sample."""

    context: ServerContext
    body: CompletionRequest
    jobs: list[Job]
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, context: ServerContext, body: CompletionRequest, header_id: str | None) -> "_Call":
        """Check what the schema can't. Raises ApiError and RequestError."""
        model = context.model
        check_model(body.model, model.names)
        body.check_stream()
        prompts = body.prompts()
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise ApiError(
                f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(prompts)}.", param="prompt"
            )
        params = body.params(model.default_params, model.default_max_tokens)
        hints = body.hints()
        jobs = [
            Job(
                prompt=p if isinstance(p, str) else {"prompt_token_ids": p},
                params=params,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                kv_hints=hints,
                add_special_tokens=body.add_special_tokens is not False,
                strict_max_tokens=body.max_tokens is not None,
            )
            for p in prompts
        ]
        return cls(context, body, jobs, public_id("cmpl", body.request_id or header_id))

    async def whole(self) -> Completion:
        """The answer in one piece."""
        finals: list[RequestOutput | None] = [None] * len(self.jobs)
        usage = UsageCounter(len(self.jobs))
        async with aclosing(run_jobs(self.context, self.jobs, self.id)) as outputs:
            async for at, output in outputs:
                finals[at] = output
                _count(usage, at, output)
        choices = [
            self._whole_choice(at, output, sequence)
            for at, output in enumerate(finals)
            if output is not None
            for sequence in output.outputs
        ]
        end = self._end_of_answer(finals)
        return self._answer(choices=choices, usage=usage.usage(), **end)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, without the final [DONE]."""
        cursors: dict[int, SequenceCursor] = {}
        offsets: dict[int, int] = {}
        finals: list[RequestOutput | None] = [None] * len(self.jobs)
        usage = UsageCounter(len(self.jobs))
        async with aclosing(run_jobs(self.context, self.jobs, self.id)) as outputs:
            async for at, output in outputs:
                finals[at] = output
                _count(usage, at, output)
                for sequence in output.outputs:
                    index = at * self.jobs[at].params.n + sequence.index
                    cursor = cursors.setdefault(index, SequenceCursor())
                    choice = self._next_choice(index, output, sequence, cursor, offsets)
                    if choice is not None:
                        yield event(self._chunk([choice], usage))
        end = self._end_of_answer(finals)
        if self.body.wants_usage:
            end["usage"] = usage.usage()
        if end:
            yield event(self._answer(choices=[], **end))

    def _end_of_answer(self, finals: Sequence[RequestOutput | None]) -> dict[str, Any]:
        return end_of_answer(
            finals,
            timing=self.context.tells_timing or bool(self.body.include_timing),
            kv_hints=self.body.kv_hints is not None,
        )

    def _chunk(self, choices: list[CompletionChoice], usage: UsageCounter) -> Completion:
        if self.body.wants_usage_in_every_chunk:
            return self._answer(choices=choices, usage=usage.usage())
        if self.body.wants_usage:
            return self._answer(choices=choices, usage=None)
        return self._answer(choices=choices)

    def _answer(self, **parts: object) -> Completion:
        return Completion(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.body.model or self.context.model.names[0],
            **parts,  # type: ignore[arg-type]
        )

    def _whole_choice(
        self, at: int, output: RequestOutput, sequence: CompletionOutput
    ) -> CompletionChoice:
        echo = self._echo(output)
        choice = CompletionChoice(
            index=at * self.jobs[at].params.n + sequence.index,
            text=echo.text + sequence.text,
            logprobs=self._logprobs(echo, sequence, 0, 0)[0],
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )
        if self.body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if self.body.return_token_ids:
            choice.token_ids = list(sequence.token_ids)
            choice.prompt_token_ids = list(output.prompt_token_ids)
        return choice

    def _next_choice(
        self,
        index: int,
        output: RequestOutput,
        sequence: CompletionOutput,
        cursor: SequenceCursor,
        offsets: dict[int, int],
    ) -> CompletionChoice | None:
        """What a chunk tells of one sequence; None when there is nothing to tell."""
        first_token = cursor.num_tokens
        added = cursor.advance(sequence)
        starts = not cursor.started and not added.is_empty
        wants_tokens = self.body.logprobs is not None or bool(self.body.return_token_ids)
        if not (added.text or added.finishes or starts or (added.num_tokens and wants_tokens)):
            return None
        cursor.started = True
        echo = self._echo(output) if starts else _Echo()
        logprobs, offsets[index] = self._logprobs(
            echo, sequence, first_token, offsets.get(index, 0)
        )
        choice = CompletionChoice(
            index=index,
            text=echo.text + added.text,
            logprobs=logprobs,
            finish_reason=sequence.finish_reason if added.finishes else None,
            stop_reason=sequence.stop_reason if added.finishes else None,
        )
        if self.body.return_token_ids:
            choice.token_ids = list(sequence.token_ids[first_token:])
            if starts:
                choice.prompt_token_ids = list(output.prompt_token_ids)
        return choice

    def _echo(self, output: RequestOutput) -> _Echo:
        if not self.body.echo:
            return _Echo()
        text = output.prompt
        if text is None:
            text = self._decode(output.prompt_token_ids, self.jobs[0].params.skip_special_tokens)
        return _Echo(text, output.prompt_token_ids, output.prompt_logprobs or ())

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        tokenizer = self.context.model.tokenizer
        return "" if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens)

    def _logprobs(
        self, echo: _Echo, sequence: CompletionOutput, first_token: int, offset: int
    ) -> tuple[CompletionLogprobs | None, int]:
        """Log probabilities from `first_token` on (and of the echo), and the next text offset."""
        if self.body.logprobs is None:
            return None, offset
        own = sequence.logprobs or []
        end = min(len(own), len(sequence.token_ids))
        told = completion_logprobs(
            [*echo.positions, *own[first_token:end]],
            [*echo.token_ids[: len(echo.positions)], *sequence.token_ids[first_token:end]],
            self.body.logprobs,
            offset,
            self._decode,
        )
        return CompletionLogprobs(**told), offset + sum(map(len, told["tokens"]))


def _count(usage: UsageCounter, at: int, output: RequestOutput) -> None:
    usage.saw(
        at,
        prompt=len(output.prompt_token_ids),
        cached=output.num_cached_tokens,
        generated=sum(len(s.token_ids) for s in output.outputs),
    )
