"""POST /v1/kv/pin, prefetch, demote, drop and explain: hints and questions about cached KV."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from moestro.core.kv_hints import HintAction, MissReason
from moestro.engine.input_processor import Prompt
from moestro.server.body import FieldRules, parse_body
from moestro.server.engine_client import ServedModel, ServerContext
from moestro.server.errors import ApiError, encode_json
from moestro.server.openai.chat_protocol import MAX_MESSAGES, ChatCompletionRequest, ChatMessage
from moestro.server.openai.fields import ApiModel, Listed, check_model
from moestro.server.openai.kv import answer_json, cached_json

RULES = FieldRules()


class PrefixBody(ApiModel):
    """A prefix: text, token ids, or messages as the chat template writes them.

    tools, chat_template_kwargs: as the chat requests have them, or their prompts begin otherwise.
    add_generation_prompt is false here unless given: more messages may follow.
    """

    model: str | None = None
    prompt: str | None = None
    prompt_token_ids: Listed[int] | None = None
    messages: (
        Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    tools: Listed[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None

    def given(self) -> list[str]:
        """Which of the ways to name a prefix it uses."""
        names = ("prompt", "prompt_token_ids", "messages")
        return [name for name in names if getattr(self, name) is not None]

    @property
    def writes_special_tokens(self) -> bool:
        """Whether the tokenizer adds bos and its kin; a template has written them already."""
        return self.messages is None and self.add_special_tokens is not False

    def read(self, model: ServedModel) -> Prompt | None:
        """The prefix; None when none is given. Raises ApiError and RequestError."""
        if self.messages is not None:
            return self._rendered(model)
        if self.prompt_token_ids is not None:
            return {"prompt_token_ids": self.prompt_token_ids}
        return self.prompt

    def _rendered(self, model: ServedModel) -> str:
        chat = ChatCompletionRequest(
            messages=self.messages or [],
            tools=self.tools,
            tool_choice="none",
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=bool(self.add_generation_prompt),
        )
        return model.chat_template.render(
            [m.for_template() for m in chat.messages], **chat.template_arguments()
        )


class HintBody(PrefixBody):
    """A hint: session_id, or a prefix."""

    session_id: str | None = None
    ttl_s: float | None = None


REQUEST_MODELS: tuple[type[BaseModel], ...] = (HintBody, PrefixBody)
Handler = Callable[[Request], Awaitable[Response]]


def handler_of(action: HintAction) -> Handler:
    """The handler of one kind of hint; its answer is a status 200 also when it is refused."""

    async def take_hint(request: Request) -> Response:
        context: ServerContext = request.app.state.context
        body = await parse_body(request, HintBody, RULES, context.max_body_bytes)
        given = [*(["session_id"] if body.session_id is not None else []), *body.given()]
        answer = await context.engine.hint(
            action,
            await _prompt(context, body, given),
            session_id=body.session_id,
            ttl_s=body.ttl_s,
            cache_salt=body.cache_salt or "",
            add_special_tokens=body.writes_special_tokens,
        )
        return _json(answer_json(answer))

    take_hint.__doc__ = f"{action} the KV of a session or a prefix."
    take_hint.__name__ = f"{action}_kv"
    return take_hint


async def explain(request: Request) -> Response:
    """What a prompt would find in the cache now, and why not more.

    That another tenant has it is not told: whoever asks must not learn what others send.
    """
    context: ServerContext = request.app.state.context
    body = await parse_body(request, PrefixBody, RULES, context.max_body_bytes)
    prompt = await _prompt(context, body, body.given())
    assert prompt is not None  # one of them was given
    num_tokens, found = await context.engine.explain(
        prompt,
        cache_salt=body.cache_salt or "",
        add_special_tokens=body.writes_special_tokens,
    )
    is_others = found.miss is MissReason.OTHER_NAMESPACE
    return _json(
        {
            "prompt_tokens": num_tokens,
            "cached_tokens": cached_json(found),
            "miss_reason": MissReason.NO_PREFIX if is_others else found.miss,
            "first_difference": found.first_difference,
        }
    )


async def _prompt(context: ServerContext, body: PrefixBody, given: list[str]) -> Prompt | None:
    """The prefix that a body names, once it names exactly one thing. Raises ApiError."""
    check_model(body.model, context.model.names)
    if len(given) != 1:
        ways = "prompt, prompt_token_ids or messages"
        if isinstance(body, HintBody):
            ways = f"session_id, {ways}"
        told = " and ".join(given) if given else "none of them"
        raise ApiError(f"Give exactly one of {ways}; got {told}.", param=(given or ["prompt"])[-1])
    if body.messages is None:
        for name in ("tools", "chat_template_kwargs", "add_generation_prompt"):
            if getattr(body, name) is not None:
                raise ApiError(f"{name} goes with messages only.", param=name)
        return body.read(context.model)
    # in a thread: a template may take seconds, and every stream would wait for it
    return await asyncio.to_thread(body.read, context.model)


def _json(body: dict[str, Any]) -> Response:
    return Response(encode_json(body), media_type="application/json")
