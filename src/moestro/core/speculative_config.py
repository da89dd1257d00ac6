"""SpeculativeConfig: how tokens are drafted, in vLLM's words."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moestro.errors import ConfigError, shown

MAX_DRAFT_TOKENS = 32
"""Most drafts of one sequence in one step."""


class DraftMethod(enum.StrEnum):
    """Where drafts come from; hybrid is the longer credible of the two others."""

    MTP = "mtp"
    NGRAM = "ngram"
    HYBRID = "hybrid"

    @property
    def uses_mtp(self) -> bool:
        """Whether the checkpoint's MTP layers are loaded and keep KV."""
        return self is not DraftMethod.NGRAM


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding, which never changes what is said.

    num_speculative_tokens: drafts of a sequence in a step, 1 to MAX_DRAFT_TOKENS. adaptive: it is
    the most, and how many pay is measured; refused so far. prompt_lookup_min and _max: length of
    the last tokens that are looked up in the sequence itself (ngram and hybrid).
    """

    method: DraftMethod
    num_speculative_tokens: int
    adaptive: bool = False
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4


def parse_speculative_config(given: Mapping[str, Any]) -> SpeculativeConfig:
    """From the option speculative_config. Raises ConfigError naming value and limit."""
    unknown = sorted(set(given) - set(_FIELDS))
    if unknown:
        raise ConfigError(
            f"speculative_config has no key {shown(unknown[0])}: its keys are {', '.join(_FIELDS)}."
        )
    methods = ", ".join(DraftMethod)
    if "method" not in given:
        raise ConfigError(f"speculative_config needs a method: one of {methods}.")
    if given["method"] not in tuple(DraftMethod):
        raise ConfigError(
            f"speculative_config: method must be one of {methods}, got {shown(given['method'])}."
        )
    if "num_speculative_tokens" not in given:
        raise ConfigError(
            "speculative_config needs num_speculative_tokens: how many tokens to draft a step, "
            f"1 to {MAX_DRAFT_TOKENS}."
        )
    config = SpeculativeConfig(
        method=DraftMethod(given["method"]),
        num_speculative_tokens=_integer(given, "num_speculative_tokens", 0, MAX_DRAFT_TOKENS),
        adaptive=_switch(given, "adaptive", False),
        prompt_lookup_min=_integer(given, "prompt_lookup_min", 2, _MAX_LOOKUP),
        prompt_lookup_max=_integer(given, "prompt_lookup_max", 4, _MAX_LOOKUP),
    )
    if config.adaptive:
        raise ConfigError(
            "speculative_config: adaptive=true is not available in this version; leave it out, and "
            "choose num_speculative_tokens."
        )
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError(
            f"speculative_config: prompt_lookup_min={config.prompt_lookup_min} is above "
            f"prompt_lookup_max={config.prompt_lookup_max}."
        )
    return config


_MAX_LOOKUP = 64
_FIELDS = tuple(SpeculativeConfig.__dataclass_fields__)


def _integer(given: Mapping[str, Any], name: str, default: int, limit: int) -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise ConfigError(
            f"speculative_config: {name} must be a whole number from 1 to {limit}, "
            f"got {shown(value)}."
        )
    return value


def _switch(given: Mapping[str, Any], name: str, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise ConfigError(f"speculative_config: {name} must be true or false, got {shown(value)}.")
    return value
