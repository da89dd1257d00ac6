"""What chat and text completions share: sampling fields, streaming options, accepted extras."""

import uuid
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from moestro.core.kv_hints import DEFAULT_PRIORITY, KVHints
from moestro.core.sampling_params import SamplingParams
from moestro.errors import shown
from moestro.server.body import Refused
from moestro.server.errors import NOT_FOUND, ApiError

STRUCTURED = "it comes with structured output in a later version."
TOOLS = "it comes with tool calling in a later version."

SDK_IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "prediction",
        "verbosity",
    }
)
"""Sent by OpenAI's SDK; they change nothing about the tokens and are accepted without effect."""

COMMON_REFUSED: Mapping[str, Refused] = {
    "response_format": Refused(STRUCTURED, ({"type": "text"},)),
    "structured_outputs": Refused(STRUCTURED),
    "guided_json": Refused(STRUCTURED),
    "guided_regex": Refused(STRUCTURED),
    "guided_choice": Refused(STRUCTURED),
    "guided_grammar": Refused(STRUCTURED),
    "guided_decoding_backend": Refused(STRUCTURED),
    "guided_whitespace_pattern": Refused(STRUCTURED),
    "structural_tag": Refused(STRUCTURED),
    "use_beam_search": Refused("there is no beam search. Use n with temperature.", (False,)),
    "length_penalty": Refused("there is no beam search.", (1.0, 1)),
    "best_of": Refused("use n, and choose among the answers yourself.", (1,)),
    "truncate_prompt_tokens": Refused("shorten the prompt before sending it.", (-1,)),
    "allowed_token_ids": Refused("use logit_bias.", ([],)),
    "bad_words": Refused("use logit_bias.", ([],)),
    "logits_processors": Refused("use logit_bias and the penalties."),
    "kv_transfer_params": Refused("KV pages are not moved between servers."),
    "return_tokens_as_token_ids": Refused("use return_token_ids.", (False,)),
    "modalities": Refused("the models served here produce text only.", (["text"],)),
    "audio": Refused("the models served here produce text only."),
    "moderation": Refused("there is no moderation here."),
}

MAX_ID_CHARS = 256
"""Every chunk of a stream repeats the id."""

SAMPLING_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "prompt_logprobs",
)


class ApiModel(BaseModel):
    """A part of a request: exact JSON types, no unknown names."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


T = TypeVar("T")
Listed = Annotated[list[T], Field(fail_fast=True)]
"""A list of a request. Its first wrong item is told: finding them all in megabytes of nonsense
would hold up every other request for minutes."""


def _check_biases(value: object) -> object:
    """The first wrong one, for the same reason; a dict has no such switch."""
    if isinstance(value, dict):
        for token, bias in value.items():
            if isinstance(bias, bool) or not isinstance(bias, int | float):
                raise ValueError(f"the bias of token {shown(token)} must be a number")
    return value


class StreamOptions(ApiModel):
    """include_obfuscation is accepted for OpenAI's SDK and has no effect."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class KVHintsBody(ApiModel):
    """Hints of one request about its own KV; core.kv_hints.KVHints checks ranges."""

    session_id: str | None = None
    pin_ttl_s: float | None = None
    priority: int | None = None
    drop_on_finish: bool | None = None

    def hints(self) -> KVHints:
        """Raises RequestError."""
        return KVHints(
            session_id=self.session_id,
            pin_ttl_s=self.pin_ttl_s,
            priority=DEFAULT_PRIORITY if self.priority is None else self.priority,
            drop_on_finish=bool(self.drop_on_finish),
        )


class GenerationRequest(ApiModel):
    """Fields of every generating route. null and absent mean the same: the model's default."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Listed[str] | None = None
    stop_token_ids: Listed[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_check_biases)] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    kv_hints: KVHintsBody | None = None
    include_timing: bool | None = None
    request_id: str | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_in_every_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def hints(self) -> KVHints | None:
        """Raises RequestError for values out of range."""
        return None if self.kv_hints is None else self.kv_hints.hints()

    def check_stream(self) -> None:
        """Raises ApiError for fields that need a stream, or don't go with one."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(
                "Stream options can only be defined when `stream=True`.", param="stream_options"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(
                "`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs"
            )

    def sampling_params(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """The model's defaults, then what the request says, then `more`. Raises RequestError."""
        said = {name: getattr(self, name) for name in SAMPLING_NAMES}
        chosen = {k: v for k, v in said.items() if v is not None}
        return defaults.with_(**{**chosen, **more})


def check_model(name: str | None, served: tuple[str, ...]) -> None:
    """Raises ApiError (404) for a model this server does not have; no name means its model."""
    if name is not None and name not in served:
        cut = name if len(name) <= 200 else name[:200] + "..."
        raise ApiError(
            f"The model `{cut}` does not exist.", status=404, kind=NOT_FOUND, param="model"
        )


def public_id(prefix: str, asked: str | None) -> str:
    """The id a client sees: the one it gave, or a new one. Raises ApiError for a long one."""
    if asked is not None and len(asked) > MAX_ID_CHARS:
        raise ApiError(
            f"request_id must have at most {MAX_ID_CHARS} characters, got {len(asked)}.",
            param="request_id",
        )
    return f"{prefix}-{asked or uuid.uuid4().hex}"
