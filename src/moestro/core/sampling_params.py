"""SamplingParams: what a user may ask of sampling, under vLLM's names and defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from moestro.core.grammar import GrammarSpec
from moestro.errors import RequestError, shown

MAX_LOGPROBS = 20
MAX_SAMPLES = 128
MAX_TOP_K = 2**31 - 1
MAX_TOKENS = 2**63 - 1
MAX_STOP_STRINGS = 256
MAX_STOP_CHARS = 65_536
"""Of all stop strings together. Each is looked for in every character, between two steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling options, validated when made.

    temperature 0 is greedy. top_k 0 or -1 and top_p 1 are off. max_tokens None means up to the
    context limit. seed None derives one from (engine seed, submission number). `stop` and
    `stop_token_ids` accept one item or several. `logprobs` and `prompt_logprobs`: how many
    alternatives beside the token itself. Raises RequestError with the field in `param`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: GrammarSpec | None = None

    def __post_init__(self) -> None:
        self._normalise()
        self._check_numbers()
        self._check_lengths()
        self._check_lists()

    @property
    def has_penalties(self) -> bool:
        """True when the counts of earlier tokens change the logits."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def with_(self, **changes: object) -> "SamplingParams":
        """A copy with some fields changed, validated again."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def _normalise(self) -> None:
        """Accept the shapes users write: one string, lists, a dict of biases, top_k -1."""
        put = object.__setattr__
        put(self, "stop", _as_tuple(self.stop, str, "stop"))
        put(self, "stop_token_ids", _as_tuple(self.stop_token_ids, int, "stop_token_ids"))
        put(self, "logit_bias", _as_biases(self.logit_bias))
        if self.top_k == -1:
            put(self, "top_k", 0)

    def _check_numbers(self) -> None:
        for name, low, high, low_open in _RANGES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise RequestError(f"{name} must be a number, got {shown(value)}.", name)
            inside = low < value <= high if low_open else low <= value <= high
            if not inside:  # nor is NaN
                span = f"{'(' if low_open else '['}{low:g}, {high:g}]"
                raise RequestError(f"{name} must be in {span}, got {shown(value)}.", name)

    def _check_lengths(self) -> None:
        _check_int(self.n, "n", 1, MAX_SAMPLES)
        _check_int(self.top_k, "top_k", 0, MAX_TOP_K)
        _check_int(self.min_tokens, "min_tokens", 0, MAX_TOKENS)
        if self.max_tokens is not None:
            _check_int(self.max_tokens, "max_tokens", 1, MAX_TOKENS)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens must be at most max_tokens={shown(self.max_tokens)}, "
                    f"got {shown(self.min_tokens)}.",
                    "min_tokens",
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(getattr(self, name), name, 0, MAX_LOGPROBS)
        if self.seed is not None:
            _check_int(self.seed, "seed", -(2**63), 2**64 - 1)

    def _check_lists(self) -> None:
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"{name} must be true or false, got {shown(getattr(self, name))}.", name
                )
        if not isinstance(self.grammar, GrammarSpec | None):
            raise RequestError(
                f"grammar must be a GrammarSpec, got {shown(self.grammar)}.", "grammar"
            )
        self._check_stop()
        for token, bias in self.logit_bias:
            if not -100.0 <= bias <= 100.0:
                raise RequestError(
                    f"logit_bias must be in [-100, 100], got {bias} for token {shown(token)}.",
                    "logit_bias",
                )

    def _check_stop(self) -> None:
        if any(not s for s in self.stop):
            raise RequestError("stop must not hold an empty string.", "stop")
        if self.stop and not self.detokenize:
            raise RequestError("stop needs detokenize=True: strings are found in text.", "stop")
        for what, amount, most in (
            ("strings", len(self.stop), MAX_STOP_STRINGS),
            ("characters in all", sum(map(len, self.stop)), MAX_STOP_CHARS),
        ):
            if amount > most:
                raise RequestError(f"stop must hold at most {most} {what}, got {amount}.", "stop")


_FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
)
_INF = float("1e38")
_RANGES = (  # name, low, high, whether low itself is refused
    ("temperature", 0.0, 2.0, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
    ("repetition_penalty", 0.0, _INF, True),
)


def sampling_field_names() -> tuple[str, ...]:
    """Names of all SamplingParams fields, in order; flags and API fields are derived from it."""
    return tuple(f.name for f in fields(SamplingParams))


def _as_tuple(value: object, kind: type, name: str) -> tuple[object, ...]:
    if value is None:
        return ()
    items = (value,) if isinstance(value, kind) else value
    if not isinstance(items, list | tuple) or any(
        not isinstance(i, kind) or isinstance(i, bool) for i in items
    ):
        raise RequestError(
            f"{name} must be {kind.__name__} or a list of it, got {shown(value)}.", name
        )
    return tuple(items)


def _as_biases(given: object) -> tuple[tuple[int, float], ...]:
    """(token id, bias) pairs from a mapping, whose keys may be text as in JSON, or from pairs."""
    try:
        pairs: Any = given.items() if isinstance(given, Mapping) else given or ()
        biases = tuple((_as_token_id(token), float(bias)) for token, bias in pairs)
        if len(dict(biases)) != len(biases):
            raise ValueError("a token twice")
    except (TypeError, ValueError, OverflowError):
        raise RequestError(
            f"logit_bias must map token ids to numbers, each id once, got {shown(given)}.",
            "logit_bias",
        ) from None
    return biases


def _as_token_id(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(value)
    return int(value)


def _check_int(value: object, name: str, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {shown(value)}.", name)
    if value < low:
        raise RequestError(f"{name} must be at least {low}, got {shown(value)}.", name)
    if value > high:
        raise RequestError(f"{name} must be at most {high}, got {shown(value)}.", name)
