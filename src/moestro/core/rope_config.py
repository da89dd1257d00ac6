"""RopeSpec from config.json, in the form transformers >= 5 writes and in the older one.

The newer form is rope_parameters {rope_theta, rope_type, ...}; the older one is rope_theta plus
rope_scaling {rope_type or type, ...}. A checkpoint may carry both: they must agree.
"""

import logging
import math

from moestro.core.config_reader import MAX_SIZE, ConfigReader
from moestro.core.model_spec import RopeSpec
from moestro.errors import CheckpointError, UnsupportedError, shown

logger = logging.getLogger(__name__)


def read_rope(config: ConfigReader, max_position_embeddings: int) -> RopeSpec:
    """The rotary embedding of a checkpoint.

    A rope_theta that stands nowhere is an error: class defaults differ between libraries.
    Raises CheckpointError and UnsupportedError.
    """
    config.require("partial_rotary_factor", 1.0, "the whole head is rotated")
    tables = [
        ConfigReader(table, f"{config.where}: {name}")
        for name in ("rope_parameters", "rope_scaling")
        if (table := config.mapping(name)) is not None
    ]
    theta = _theta([*tables, config])
    outer = "original_max_position_embeddings"
    outer_length = config.integer(outer) if config.has(outer) else None
    specs = [_read_one(t, theta, max_position_embeddings, outer_length) for t in tables]
    if len(specs) == 2 and specs[0] != specs[1]:
        raise CheckpointError(
            f"{config.where}: rope_parameters={shown(config.value('rope_parameters'))} and "
            f"rope_scaling={shown(config.value('rope_scaling'))} contradict each other. Keep the "
            "one the model was trained with."
        )
    return specs[0] if specs else RopeSpec(theta=theta)


def _theta(places: list[ConfigReader]) -> float:
    """The one rope_theta of all places that may hold it; the last place is the config itself."""
    key = "rope_theta"
    found = [(place, place.number(key, low=1.0)) for place in places if place.has(key)]
    if not found:
        raise CheckpointError(
            f"{places[-1].where} has no rope_theta, neither in rope_parameters nor beside "
            "rope_scaling. Add the value the model was trained with."
        )
    first, theta = found[0]
    for place, value in found[1:]:
        if value != theta:
            raise place.wrong(key, f"contradicts {theta!r} in {first.where}: keep the right one")
    return theta


def _read_one(
    table: ConfigReader, theta: float, max_position_embeddings: int, outer_length: int | None
) -> RopeSpec:
    kind = table.text(table.alias("rope_type", "type"), "default")
    table.require("partial_rotary_factor", 1.0, "the whole head is rotated")
    if kind == "yarn":
        spec = _read_yarn(table, theta, max_position_embeddings, outer_length)
    elif kind == "default":
        table.require("factor", 1.0, "rope_type default does not scale")
        spec = RopeSpec(theta=theta)
    else:
        raise UnsupportedError(
            f"{table.where}: rope_type={shown(kind)} is not supported; default and yarn are."
        )
    table.refuse_unknown(())
    return spec


def _read_yarn(
    table: ConfigReader, theta: float, max_position_embeddings: int, outer_length: int | None
) -> RopeSpec:
    """YaRN with the defaults of its paper: betas 32 and 1, attention factor 0.1 ln(s) + 1."""
    factor = table.number("factor", low=1.0, low_open=False)
    key = "original_max_position_embeddings"
    if table.has(key):
        original = table.integer(key)
        if outer_length not in (None, original):
            raise table.wrong(key, f"contradicts {key}={outer_length} outside")
    elif outer_length is not None:
        original = outer_length
    else:
        original = max_position_embeddings
        logger.warning(
            "%s has no %s: taking max_position_embeddings=%d.", table.where, key, original
        )
    if original * factor > MAX_SIZE:
        raise table.wrong("factor", f"stretches {original} positions beyond {MAX_SIZE}")
    beta_fast = table.number("beta_fast", 32.0, low=0.0)
    beta_slow = table.number("beta_slow", 1.0, low=0.0)
    if beta_fast < beta_slow:
        raise table.wrong("beta_fast", f"must be at least beta_slow={beta_slow:g}")
    return RopeSpec(
        theta=theta,
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=table.number("attention_factor", 0.1 * math.log(factor) + 1.0, low=0.0),
        truncate=table.boolean("truncate", True),
    )
