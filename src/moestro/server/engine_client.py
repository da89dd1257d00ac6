"""What the server needs of an engine, and what it knows of the model behind it."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moestro.chat.templates import ChatTemplate
from moestro.core.kv_hints import HintAction, HintAnswer, KVHints, PrefixUse
from moestro.core.outputs import RequestOutput
from moestro.core.sampling_params import SamplingParams
from moestro.engine.input_processor import Prompt
from moestro.metrics import ServerMetrics

MAX_BODY_BYTES = 64 * 1024 * 1024


class EngineClient(Protocol):
    """An engine that runs beside the event loop (engine.async_engine.AsyncEngine)."""

    @property
    def is_dead(self) -> bool:
        """True once the loop has failed: nothing will be answered any more."""

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
        kv_hints: KVHints | None = None,
        add_special_tokens: bool = True,
        strict_max_tokens: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """What there is so far, each time something was added; closing the iterator aborts.

        The lists in an output may grow when the next one is asked for.
        Raises RequestError, CapacityError and EngineDeadError.
        """

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
        """What became of a hint about the KV of a session or a prompt.

        Raises RequestError and EngineDeadError.
        """

    async def explain(
        self, prompt: Prompt, *, cache_salt: str = "", add_special_tokens: bool = True
    ) -> tuple[int, PrefixUse]:
        """A prompt's tokens and what it would find in the cache.

        Raises RequestError and EngineDeadError.
        """


class Decoder(Protocol):
    """The part of a tokenizer that `echo` and token texts need."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model as the API tells it. `names`: the first is shown, any is accepted.

    default_params: sampling values of a request that does not say (generation_config.json).
    default_max_tokens: its max_new_tokens; None where it gives none, and the route decides.
    tokenizer None: prompts and answers are token ids.
    """

    names: tuple[str, ...]
    root: str
    max_model_len: int
    created: int
    chat_template: ChatTemplate
    tokenizer: Decoder | None
    default_params: SamplingParams = field(default_factory=SamplingParams)
    default_max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """Everything a route works with. tells_timing: every answer, asked for or not."""

    engine: EngineClient
    model: ServedModel
    metrics: ServerMetrics
    version: str
    max_body_bytes: int = MAX_BODY_BYTES
    tells_timing: bool = False
