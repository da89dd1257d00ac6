"""From what a user sends (a prompt and sampling options) to a Request the scheduler can trust."""

import itertools
import logging
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from moestro.core.kv_hints import KVHints
from moestro.core.request import Request
from moestro.core.sampling_params import SamplingParams
from moestro.engine.tokenizer import Tokenizer
from moestro.errors import CheckpointError, RequestError, shown

logger = logging.getLogger(__name__)

_WORD = 2**64 - 1


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is only shown in the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a client may say of a request beside prompt and sampling; no token depends on it."""

    priority: int = 0
    cache_salt: str = ""
    kv_hints: KVHints | None = None


NO_OPTIONS = RequestOptions()


@dataclass(frozen=True, slots=True)
class InputLimits:
    """What a request must stay within. kv_tokens: what the KV memory holds of one sequence."""

    vocab_size: int
    max_model_len: int
    kv_tokens: int

    @property
    def context(self) -> int:
        """Most tokens of prompt and output together."""
        return min(self.max_model_len, self.kv_tokens)


class InputProcessor:
    """Tokenises and checks requests; everything a client can get wrong is refused here.

    tokenizer None: token ids only. eos_token_ids: of the checkpoint. default_params: for callers
    that give none. default_max_tokens: the checkpoint's max_new_tokens, if it has any; interfaces
    with a default of their own ask for it. scheduling_policy tells whether priorities have an
    effect.
    """

    def __init__(
        self,
        limits: InputLimits,
        tokenizer: Tokenizer | None,
        *,
        eos_token_ids: Iterable[int],
        engine_seed: int,
        default_params: SamplingParams | None = None,
        default_max_tokens: int | None = None,
        scheduling_policy: str = "fcfs",
    ) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self.default_params = default_params or SamplingParams()
        self.default_max_tokens = default_max_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._engine_seed = engine_seed
        self._scheduling_policy = scheduling_policy
        self._submissions = itertools.count()
        self._told_of_cap = False
        self._check_tokenizer()

    def next_submission(self) -> int:
        """The number of the next request; an unseeded one draws its seed from it."""
        return next(self._submissions)

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str,
        submission: int | None = None,
        options: RequestOptions = NO_OPTIONS,
        add_special_tokens: bool = True,
        strict_max_tokens: bool = False,
    ) -> Request:
        """Check everything and tokenise. Raises RequestError with the offending field in `param`.

        submission: a number taken earlier with next_submission. max_tokens that goes beyond the
        context is capped, or refused when strict_max_tokens (as vLLM's server does).
        """
        number = self.next_submission() if submission is None else submission
        params = self.default_params if params is None else params
        self._check_params(params)
        self._check_priority(options.priority)
        _check_text("request_id", request_id)
        _check_text("cache_salt", options.cache_salt)
        _check_hints(options.kv_hints)
        text, token_ids = self.tokens_of(prompt, add_special_tokens)
        seed = derive_seed(self._engine_seed, number) if params.seed is None else params.seed
        eos = frozenset() if params.ignore_eos else self._eos_token_ids
        return Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            seed=seed & _WORD,
            max_tokens=self._max_tokens(len(token_ids), params, strict_max_tokens),
            stop_token_ids=eos | frozenset(params.stop_token_ids),
            eos_token_ids=eos,
            prompt=text,
            priority=options.priority,
            cache_salt=options.cache_salt,
            kv_hints=options.kv_hints,
        )

    def tokens_of(
        self, prompt: Prompt, add_special_tokens: bool = True
    ) -> tuple[str | None, tuple[int, ...]]:
        """A prompt's text, if it has one, and its token ids, checked. Raises RequestError."""
        self._check_listed(prompt)
        text, token_ids = _split_prompt(prompt)
        if token_ids is None:
            # An empty text is refused even where a bos would make it one token.
            token_ids = self._tokenize(text, add_special_tokens) if text else []
            self._check_known(token_ids)
        self._check_prompt(token_ids)
        return text, tuple(token_ids)

    def _check_priority(self, priority: int) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority must be an integer, got {shown(priority)}.", "priority")
        if priority and self._scheduling_policy != "priority":
            raise RequestError(
                f"priority={shown(priority)} has no effect under scheduling_policy "
                f"{self._scheduling_policy!r}: start with --scheduling-policy priority "
                "(scheduling_policy= in Python), or leave priority out.",
                "priority",
            )

    def _tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise RequestError(
                "skip_tokenizer_init is set: prompts must be token ids (prompt_token_ids).",
                "prompt",
            )
        longest = self.tokenizer.max_chars_per_token
        room = self.limits.context - 1
        if longest is not None and len(text) > room * longest:
            raise RequestError(
                f"This model's maximum context length is {self.limits.context} tokens. However, "
                f"your prompt contains {len(text)} characters (more than {room * longest} "
                f"characters, which is the upper bound for {room} input tokens). Please reduce "
                "the length of the input prompt.",
                "input_text",
            )
        return self.tokenizer.encode(text, add_special_tokens)

    def _check_tokenizer(self) -> None:
        """Whether tokenizer and model belong together. Raises CheckpointError when they can't."""
        size = self.limits.vocab_size
        strays = sorted(i for i in self._eos_token_ids if not 0 <= i < size)
        if strays:
            raise CheckpointError(
                f"The end-of-sequence ids {shown(strays)} are not among the model's {size} tokens: "
                "the tokenizer is another model's. Point `tokenizer` at the right one."
            )
        if self.tokenizer is not None and self.tokenizer.vocab_size > size:
            logger.warning(
                "the tokenizer has %d tokens, the model %d: prompts with the others are refused",
                *(self.tokenizer.vocab_size, size),
            )

    def _check_listed(self, prompt: object) -> None:
        """The length of a list of ids before anything is done with each of them."""
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        if isinstance(ids, list | tuple) and len(ids) > self.limits.context:
            self._check_length(len(ids))

    def _check_known(self, token_ids: Sequence[int]) -> None:
        highest, size = max(token_ids, default=0), self.limits.vocab_size
        if highest >= size:
            raise RequestError(
                f"The tokenizer made token {highest} of the prompt, and the model has only {size}: "
                "they don't belong together. Point `tokenizer` at the model's own.",
                "prompt",
            )

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise RequestError(
                "The prompt is empty: send some text or at least one token id.", "prompt"
            )
        self._check_length(len(token_ids))
        vocab_size = self.limits.vocab_size
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= vocab_size:
            raise RequestError(
                f"Token id {shown(low if low < 0 else high)} is out of vocabulary: ids must be in "
                f"[0, {vocab_size - 1}].",
                "prompt",
            )

    def _check_length(self, num_tokens: int) -> None:
        limits = self.limits
        if num_tokens < limits.context:
            return
        if num_tokens < limits.max_model_len:
            raise RequestError(
                f"The KV cache memory holds {limits.kv_tokens} tokens. However, your prompt "
                f"contains {num_tokens} input tokens, which leaves no room for an output token. "
                "Please reduce the length of the input prompt, or raise kv_cache_memory_bytes.",
                "input_tokens",
            )
        excess = "leaves no room for an output token"
        if num_tokens > limits.max_model_len:
            excess = "exceeds this limit even without any output tokens"
        raise RequestError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your "
            f"prompt contains {num_tokens} input tokens, which {excess}. Please reduce the length "
            "of the input prompt.",
            "input_tokens",
        )

    def _max_tokens(self, num_prompt: int, params: SamplingParams, strict: bool) -> int:
        room, asked = self.limits.context - num_prompt, params.max_tokens
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens={params.min_tokens} is more than the {room} tokens that the context "
                f"of {self.limits.context} leaves beside the prompt's {num_prompt}. Lower it, or "
                "shorten the prompt.",
                "min_tokens",
            )
        if asked is None or asked <= room:
            return room if asked is None else asked
        if strict:
            raise RequestError(
                f"This model's maximum context length is {self.limits.context} tokens. However, "
                f"you requested {asked} output tokens and your prompt contains {num_prompt} input "
                f"tokens, for a total of {asked + num_prompt} tokens. Please reduce the length of "
                "the input prompt or the number of requested output tokens.",
                "max_tokens",
            )
        if not self._told_of_cap:
            self._told_of_cap = True
            logger.warning(
                "max_tokens %d is capped to %d: the context holds %d tokens and the prompt has %d "
                "(told once)",
                *(asked, room, self.limits.context, num_prompt),
            )
        return room

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}.",
                "sampling_params",
            )
        size = self.limits.vocab_size
        for name, ids in (
            ("logit_bias", [t for t, _ in params.logit_bias]),
            ("stop_token_ids", params.stop_token_ids),
        ):
            strays = [t for t in ids if not 0 <= t < size]
            if strays:
                raise RequestError(
                    f"{name} holds token ids out of vocabulary: {shown(strays[:10])}; ids must be "
                    f"in [0, {size - 1}].",
                    name,
                )
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name)
            if wanted is not None and wanted > size:
                raise RequestError(
                    f"{name} must be at most the vocabulary's {size} tokens, got {wanted}.", name
                )
        if params.stop and self.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, and skip_tokenizer_init is set: use "
                "stop_token_ids.",
                "stop",
            )


def derive_seed(engine_seed: int, submission: int) -> int:
    """The seed of an unseeded request: two rounds of splitmix64, so neighbours are unrelated."""
    return _splitmix64(_splitmix64(engine_seed & _WORD) + submission)


def _splitmix64(state: int) -> int:
    """Output of Steele, Lea and Flood's splitmix64 generator for a state; 64 bits."""
    z = (state + 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


_PROMPT_KEYS = ("prompt", "prompt_token_ids")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise RequestError(f"{name} must be text, got {shown(value)}.", name)


def _check_hints(hints: object) -> None:
    if hints is not None and not isinstance(hints, KVHints):
        raise RequestError(f"kv_hints must be KVHints, got {shown(hints)}.", "kv_hints")


def _split_prompt(prompt: object) -> tuple[str | None, list[int] | None]:
    """Text and ids of a prompt in any accepted shape; ids win where both are given."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        others = [k for k, v in prompt.items() if k not in _PROMPT_KEYS and v is not None]
        if others:
            raise RequestError(
                f"A prompt object holds {' and '.join(_PROMPT_KEYS)}, nothing else; got also "
                f"{shown(others)}. The models served here read text only.",
                "prompt",
            )
        if ids is None and text is None:
            raise RequestError(
                "A prompt object needs `prompt` (text) or `prompt_token_ids`, got the keys "
                f"{sorted(map(str, prompt))}.",
                "prompt",
            )
        if text is not None and not isinstance(text, str):
            raise RequestError(f"prompt must be text, got {type(text).__name__}.", "prompt")
        return text, None if ids is None else _as_ids(ids)
    return None, _as_ids(prompt)


def _as_ids(ids: object) -> list[int]:
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        raise RequestError(
            f"A prompt must be text or a list of token ids, got {type(ids).__name__}.", "prompt"
        )
    checked = []
    for at, token_id in enumerate(ids):
        try:
            if isinstance(token_id, bool):
                raise TypeError
            checked.append(operator.index(token_id))
        except TypeError:
            raise RequestError(
                f"prompt_token_ids must be integers, got {shown(token_id)} at position {at}.",
                "prompt",
            ) from None
    return checked
