"""What speculative_config asks for, and whether the checkpoint can do it."""

from moestro.config import EngineConfig
from moestro.core.model_spec import ModelSpec
from moestro.core.speculative_config import (
    DraftMethod,
    SpeculativeConfig,
    parse_speculative_config,
)
from moestro.errors import ConfigError


def plan_speculation(config: EngineConfig) -> SpeculativeConfig | None:
    """None where nothing is drafted. Raises ConfigError naming value and limit."""
    given = config.speculative_config
    return None if given is None else parse_speculative_config(given)


def held_mtp_layers(
    model: str, spec: ModelSpec, speculation: SpeculativeConfig | None, stored: int
) -> int:
    """MTP layers whose weights and KV are held: those `stored`, none where they don't draft.

    Raises ConfigError for a method that needs them where there are none.
    """
    if speculation is None or not speculation.method.uses_mtp:
        return 0
    if not stored:
        why = "its config.json promises none (num_nextn_predict_layers)"
        if spec.num_mtp_layers:
            why = f"config.json promises {spec.num_mtp_layers}, but the files hold none"
        raise ConfigError(
            f"speculative_config: method {speculation.method.value!r} drafts with MTP layers, and "
            f"{model} has no MTP layer: {why}. Use method {DraftMethod.NGRAM.value!r}, or no "
            "speculative_config."
        )
    return stored
