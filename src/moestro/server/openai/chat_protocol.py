"""/v1/chat/completions: what a request and a response hold."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from moestro.chat.templates import check_template_kwargs
from moestro.core.sampling_params import SamplingParams
from moestro.server.body import FieldRules, Refused
from moestro.server.errors import ApiError
from moestro.server.openai.fields import (
    COMMON_REFUSED,
    SDK_IGNORED,
    TOOLS,
    ApiModel,
    GenerationRequest,
    Listed,
)
from moestro.server.openai.usage import Usage

MAX_MESSAGES = 16_384

RULES = FieldRules(
    ignored=SDK_IGNORED,
    refused={
        **COMMON_REFUSED,
        "functions": Refused(TOOLS, ([],)),
        "function_call": Refused(TOOLS, ("none",)),
        "web_search_options": Refused("there is no web search."),
        "echo": Refused("use /v1/completions.", (False,)),
        "documents": Refused("put their text into the messages.", ([],)),
        "chat_template": Refused("start the server with --chat-template."),
        "mm_processor_kwargs": Refused("the models served here read text only."),
        "media_io_kwargs": Refused("the models served here read text only."),
        "thinking_token_budget": Refused("it comes with reasoning in a later version."),
        "include_reasoning": Refused("it comes with reasoning in a later version.", (True,)),
    },
)


class ChatMessage(ApiModel):
    """One message; chat.messages checks what its content and tool calls hold.

    annotations, audio and function_call are what OpenAI's SDK writes back when it is handed an
    earlier answer as it came.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Listed[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Listed[dict[str, Any]] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    def for_template(self) -> dict[str, Any]:
        """What the chat template sees: what is set, developer as system, one reasoning field."""
        told = self.model_dump(exclude_none=True, exclude={"annotations", "refusal", "reasoning"})
        if self.role == "developer":
            told["role"] = "system"
        if self.reasoning is not None:
            told["reasoning_content"] = self.reasoning
        return told


class ChatCompletionRequest(GenerationRequest):
    """Unset max_tokens is what the context leaves. tools reach the template only when none may
    be called (tool_choice none)."""

    messages: Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def own_max_tokens(self) -> int | None:
        """What the client asks for, under either name."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    def params(
        self, defaults: SamplingParams, default_max_tokens: int | None = None
    ) -> SamplingParams:
        """default_max_tokens: the checkpoint's; None is what the context leaves.

        Raises ApiError and RequestError.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(
                "when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs"
            )
        own = self.own_max_tokens
        more: dict[str, Any] = {"max_tokens": default_max_tokens if own is None else own}
        if self.logprobs:
            more["logprobs"] = self.top_logprobs or 0
        return self.sampling_params(defaults, **more)

    @property
    def _opens_answer(self) -> bool:
        """add_generation_prompt, whose default gives way to continue_final_message."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    def template_arguments(self) -> dict[str, Any]:
        """Keywords of the chat template. Raises ApiError (tools to call) and RequestError."""
        if self.tool_choice not in (None, "none", "auto") or (
            self.tools and self.tool_choice != "none"
        ):
            field = "tools" if self.tools else "tool_choice"
            raise ApiError(
                f"{field} is not supported: {TOOLS} With tool_choice 'none' the template shows "
                "the tools and none is called.",
                param=field,
            )
        told = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            told.setdefault("reasoning_effort", self.reasoning_effort)
        check_template_kwargs(told)
        return {
            **told,
            "tools": self.tools or None,
            "add_generation_prompt": self._opens_answer,
            "continue_final_message": bool(self.continue_final_message),
        }


class AssistantMessage(BaseModel):
    role: str = "assistant"
    content: str | None
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timing: dict[str, Any] | None = None
    kv_hints: dict[str, Any] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class Delta(BaseModel):
    """What a chunk adds; only what is set is sent."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(BaseModel):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    timing: dict[str, Any] | None = None
    kv_hints: dict[str, Any] | None = None
