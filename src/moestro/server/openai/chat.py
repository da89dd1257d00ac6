"""POST /v1/chat/completions."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from starlette.responses import Response

from moestro.core.outputs import CompletionOutput, RequestOutput
from moestro.server.body import parse_body
from moestro.server.engine_client import ServerContext
from moestro.server.errors import INTERNAL, ApiError
from moestro.server.generation import Job, SequenceCursor, run_job
from moestro.server.openai.chat_protocol import (
    RULES,
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Delta,
)
from moestro.server.openai.fields import check_model, public_id
from moestro.server.openai.kv import end_of_answer
from moestro.server.openai.logprobs import chat_logprobs, prompt_logprobs
from moestro.server.openai.usage import Usage, UsageCounter
from moestro.server.stream import event, respond


async def create_chat_completion(request: Request) -> Response:
    """The answer to a conversation, whole or streamed."""
    context: ServerContext = request.app.state.context
    body = await parse_body(request, ChatCompletionRequest, RULES, context.max_body_bytes)
    # in a thread: a template may take seconds, and every other stream would wait for it
    call = await asyncio.to_thread(_Call.of, context, body, request.scope.get("request_id"))
    return await respond(request, call, bool(body.stream))


@dataclass(slots=True)
class _Call:
    """One call: its job, and how outputs become choices."""

    context: ServerContext
    body: ChatCompletionRequest
    job: Job
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(
        cls, context: ServerContext, body: ChatCompletionRequest, header_id: str | None
    ) -> "_Call":
        """Check what the schema can't and render the template. Raises ApiError, RequestError."""
        model = context.model
        check_model(body.model, model.names)
        body.check_stream()
        params = body.params(model.default_params, model.default_max_tokens)
        text = model.chat_template.render(
            [m.for_template() for m in body.messages], **body.template_arguments()
        )
        job = Job(
            prompt=text,
            params=params,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            kv_hints=body.hints(),
            # the template has written bos and its kin already
            add_special_tokens=body.add_special_tokens is True,
            strict_max_tokens=body.own_max_tokens is not None,
        )
        return cls(context, body, job, public_id("chatcmpl", body.request_id or header_id))

    async def whole(self) -> ChatCompletion:
        """The answer in one piece."""
        final: RequestOutput | None = None
        async with aclosing(run_job(self.context, self.job, self.id)) as outputs:
            async for output in outputs:
                final = output
        if final is None:
            raise ApiError("The engine gave no answer.", status=500, kind=INTERNAL)
        answer = ChatCompletion(
            id=self.id,
            created=self.created,
            model=self._model_name,
            choices=[self._whole_choice(sequence) for sequence in final.outputs],
            usage=_usage(final),
            **self._end_of_answer(final),
        )
        if self.body.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(final.prompt_logprobs)
        if self.body.return_token_ids:
            answer.prompt_token_ids = list(final.prompt_token_ids)
        return answer

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, without the final [DONE]."""
        cursors = [SequenceCursor() for _ in range(self.job.params.n)]
        usage: Usage | None = None
        output: RequestOutput | None = None
        async with aclosing(run_job(self.context, self.job, self.id)) as outputs:
            async for output in outputs:
                usage = _usage(output)
                for sequence in output.outputs:
                    for choice in self._next_choices(sequence, cursors[sequence.index]):
                        yield event(self._chunk([choice], usage))
        end = self._end_of_answer(output)
        if self.body.wants_usage:
            end["usage"] = usage
        if end:
            yield event(self._answer(choices=[], **end))

    def _end_of_answer(self, final: RequestOutput | None) -> dict[str, Any]:
        return end_of_answer(
            [final],
            timing=self.context.tells_timing or bool(self.body.include_timing),
            kv_hints=self.job.kv_hints is not None,
        )

    @property
    def _model_name(self) -> str:
        return self.body.model or self.context.model.names[0]

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage) -> ChatCompletionChunk:
        if self.body.wants_usage_in_every_chunk:
            return self._answer(choices=choices, usage=usage)
        if self.body.wants_usage:
            return self._answer(choices=choices, usage=None)
        return self._answer(choices=choices)

    def _answer(self, **parts: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self.created,
            model=self._model_name,
            **parts,
        )

    def _whole_choice(self, sequence: CompletionOutput) -> ChatChoice:
        choice = ChatChoice(
            index=sequence.index,
            message=AssistantMessage(content=sequence.text),
            logprobs=self._logprobs(sequence, 0),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )
        if self.body.return_token_ids:
            choice.token_ids = list(sequence.token_ids)
        return choice

    def _next_choices(
        self, sequence: CompletionOutput, cursor: SequenceCursor
    ) -> list[ChatChunkChoice]:
        """What the next chunks tell of one sequence: its role once, then what was added."""
        told = []
        if not cursor.started:
            cursor.started = True
            opening = Delta(role="assistant", content="")
            told.append(
                ChatChunkChoice(
                    index=sequence.index, delta=opening, logprobs=None, finish_reason=None
                )
            )
        first_token = cursor.num_tokens
        added = cursor.advance(sequence)
        wants_tokens = bool(self.body.logprobs or self.body.return_token_ids)
        if added.text or added.finishes or (added.num_tokens and wants_tokens):
            choice = ChatChunkChoice(
                index=sequence.index,
                delta=Delta(content=added.text),
                logprobs=self._logprobs(sequence, first_token),
                finish_reason=sequence.finish_reason if added.finishes else None,
            )
            if added.finishes:
                choice.stop_reason = sequence.stop_reason
            if self.body.return_token_ids:
                choice.token_ids = list(sequence.token_ids[first_token:])
            told.append(choice)
        return told

    def _logprobs(self, sequence: CompletionOutput, first_token: int) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        positions = (sequence.logprobs or [])[first_token:]
        return chat_logprobs(positions, self.body.top_logprobs or 0)


def _usage(output: RequestOutput) -> Usage:
    counter = UsageCounter(1)
    counter.saw(
        0,
        prompt=len(output.prompt_token_ids),
        cached=output.num_cached_tokens,
        generated=sum(len(s.token_ids) for s in output.outputs),
    )
    return counter.usage()
