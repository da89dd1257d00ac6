"""/v1/completions: what a request and a response hold."""

from typing import Any, cast

from pydantic import BaseModel

from moestro.core.sampling_params import SamplingParams
from moestro.server.body import FieldRules, Refused
from moestro.server.openai.fields import COMMON_REFUSED, SDK_IGNORED, GenerationRequest, Listed
from moestro.server.openai.usage import Usage

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024

RULES = FieldRules(
    ignored=SDK_IGNORED,
    refused={
        **COMMON_REFUSED,
        "suffix": Refused("these models do not fill in the middle.", ("",)),
        "prompt_embeds": Refused("send text or token ids."),
    },
)


class CompletionRequest(GenerationRequest):
    """Unset max_tokens is the checkpoint's, else 16.

    `logprobs` is a number here; `echo` returns the prompt too.
    """

    prompt: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    echo: bool | None = None
    logprobs: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one: text, or token ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if given and isinstance(given[0], int):  # all are alike
            return [given]
        return cast(list[str | list[int]], given)

    def params(
        self, defaults: SamplingParams, default_max_tokens: int | None = None
    ) -> SamplingParams:
        """default_max_tokens: the checkpoint's, None where it has none. Raises RequestError."""
        more: dict[str, Any] = {"logprobs": self.logprobs}
        limits = (self.max_tokens, default_max_tokens, DEFAULT_MAX_TOKENS)
        more["max_tokens"] = next(n for n in limits if n is not None)
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            more["prompt_logprobs"] = self.logprobs
        return self.sampling_params(defaults, **more)


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """Also one entry of a stream chunk, with the text that is new."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Completion(BaseModel):
    """The whole answer, and a chunk of a streamed one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    timing: dict[str, Any] | list[dict[str, Any] | None] | None = None
    kv_hints: dict[str, Any] | list[dict[str, Any] | None] | None = None
