"""Command-line flags of SamplingParams: one for each field, only what the user wrote is kept."""

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from moestro.core.generation_config import CHECKPOINT_FIELDS
from moestro.core.sampling_params import SamplingParams, sampling_field_names
from moestro.errors import ConfigError, shown

_PREFIX = "sampling_"
_INTS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
_LISTS = ("stop", "stop_token_ids")
_SHARED = "seed"


def add_sampling_flags(parser: argparse.ArgumentParser, defaults: Mapping[str, str]) -> None:
    """Add --temperature, --max-tokens and so on; a grammar is no plain value and has no flag.

    Where the engine's flags are present (add them first), --seed is one flag for both: it seeds
    the engine and each request. defaults: for the help, what holds in this command for fields
    that are neither the checkpoint's nor SamplingParams' own.
    """
    group = parser.add_argument_group("Sampling")
    for name in sampling_field_names():
        if name == "grammar":
            continue
        try:
            group.add_argument(
                _flag_of(name),
                dest=name if name == _SHARED else _PREFIX + name,
                default=argparse.SUPPRESS,
                help=_help(name, defaults),
                **_reading(name),
            )
        except argparse.ArgumentError:
            if name != _SHARED:
                raise


def sampling_overrides_from_args(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords for SamplingParams from the flags that were given.

    Raises ConfigError for text that is no value, RequestError for a value out of range: now,
    before a model is read.
    """
    given = vars(args)
    overrides: dict[str, Any] = {}
    for name in sampling_field_names():
        key = name if name == _SHARED else _PREFIX + name
        if key in given:
            overrides[name] = _typed(name, given[key])
    SamplingParams(**{"max_tokens": None, **overrides})
    return overrides


def refuse_without_effect(
    overrides: Mapping[str, Any], fixed: SamplingParams, reasons: Mapping[str, str]
) -> None:
    """Raise ConfigError for a flag whose value this command can't honour.

    reasons: why, by field; `fixed` holds the one value such a field may have.
    """
    for name, reason in reasons.items():
        if name in overrides and overrides[name] != getattr(fixed, name):
            raise ConfigError(f"{_flag_of(name)} has no effect here: {reason}.")


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _reading(name: str) -> dict[str, Any]:
    if isinstance(_default(name), bool):
        return {"action": argparse.BooleanOptionalAction}
    if name in _LISTS:
        return {"action": "append", "metavar": "TEXT" if name == "stop" else "ID"}
    return {"metavar": "JSON" if name == "logit_bias" else "N"}


def _typed(name: str, text: Any) -> Any:
    """The value a flag's text stands for; ranges are checked by SamplingParams."""
    if isinstance(text, bool) or name == "stop":
        return text
    flag = _flag_of(name)
    if name == "max_tokens" and text == "none":
        return None
    if name == "stop_token_ids":
        parts = [part for item in text for part in item.split(",")]
        return [_number(flag, part, int, "a token id") for part in parts]
    if name == "logit_bias":
        return _biases(flag, text)
    if name in _INTS:
        return _number(flag, text, int, "a whole number")
    return _number(flag, text, float, "a number")


def _number(flag: str, text: str, kind: Callable[[str], Any], what: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{flag} must be {what}, got {shown(text)}.") from None


def _biases(flag: str, text: str) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ConfigError(
            f"{flag} must be a JSON object of token ids to numbers, such as '{{\"5\": -1.5}}', "
            f"got {shown(text)}."
        ) from None


def _default(name: str) -> object:
    return getattr(SamplingParams(), name)


def _help(name: str, defaults: Mapping[str, str]) -> str:
    own = _default(name)
    text = "on" if own is True else "off" if own is False else f"{own}"
    if isinstance(own, float):
        text = f"{own:g}"
    if name in CHECKPOINT_FIELDS:
        text = f"the checkpoint's, else {text}"
    text = defaults.get(name, text)
    return _HELP[name] + ("" if own in (None, ()) else f" (default: {text})")


_HELP = {
    "n": "sequences to generate for each prompt",
    "temperature": "0 is greedy; higher is more random",
    "top_p": "sample from the smallest set of tokens with this probability; 1 is off",
    "top_k": "sample from the k most likely tokens; 0 is off",
    "min_p": "least probability relative to the most likely token; 0 is off",
    "presence_penalty": "penalty for tokens already generated",
    "frequency_penalty": "penalty for each time a token was generated",
    "repetition_penalty": "divisor for tokens of prompt and output; 1 is off",
    "seed": "seed of the sampling noise",
    "max_tokens": "most tokens to generate; none means up to the context limit",
    "min_tokens": "tokens to generate before a stop token counts",
    "stop": "text that ends a sequence; may be repeated",
    "stop_token_ids": "token ids that end a sequence, separated by commas; may be repeated",
    "ignore_eos": "generate on after an end-of-sequence token",
    "include_stop_str_in_output": "keep the stop text in the output",
    "skip_special_tokens": "leave special tokens out of the text",
    "spaces_between_special_tokens": "put spaces between special tokens",
    "detokenize": "turn token ids into text",
    "logprobs": "report this many alternatives beside each token",
    "prompt_logprobs": "report this many alternatives for each prompt token",
    "logit_bias": "JSON object of token ids to biases added to their logits",
}
