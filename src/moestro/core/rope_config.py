"""RopeSpec from config.json, in the form transformers >= 5 writes and in the older one.

The newer form is rope_parameters {rope_theta, rope_type, ...}; the older one is rope_theta plus
rope_scaling {rope_type or type, ...}. A checkpoint may carry both: they must agree.
"""

import logging
import math
from typing import Any

from moestro.core.config_reader import ConfigReader
from moestro.core.model_spec import RopeSpec
from moestro.errors import CheckpointError, UnsupportedError

logger = logging.getLogger(__name__)

_YARN_KEYS = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "truncate",
)


def read_rope(config: ConfigReader, max_position_embeddings: int) -> RopeSpec:
    """The rotary embedding of a checkpoint.

    A rope_theta that stands nowhere is an error: class defaults differ between libraries.
    Raises CheckpointError and UnsupportedError.
    """
    config.require("partial_rotary_factor", 1.0, "the whole head is rotated")
    newer = config.mapping("rope_parameters")
    older = config.mapping("rope_scaling")
    outer_length = _outer_length(config)
    specs = [
        _read_one(table, name, config, max_position_embeddings, outer_length)
        for name, table in (("rope_parameters", newer), ("rope_scaling", older))
        if table is not None
    ]
    if not specs:
        return RopeSpec(theta=_theta(config, None))
    if len(specs) == 2 and specs[0] != specs[1]:
        raise CheckpointError(
            f"{config.where}: rope_parameters={newer!r} and rope_scaling={older!r} contradict "
            "each other. Keep the one the model was trained with."
        )
    return specs[0]


def _outer_length(config: ConfigReader) -> int | None:
    key = "original_max_position_embeddings"
    return config.integer(key) if config.has(key) else None


def _read_one(
    table: dict[str, Any],
    name: str,
    config: ConfigReader,
    max_position_embeddings: int,
    outer_length: int | None,
) -> RopeSpec:
    reader = ConfigReader(table, f"{config.where}: {name}")
    kind = reader.text(reader.alias("rope_type", "type"), "default")
    theta = _theta(config, reader)
    reader.require("partial_rotary_factor", 1.0, "the whole head is rotated")
    if kind == "yarn":
        spec = _read_yarn(reader, theta, max_position_embeddings, outer_length)
    elif kind == "default":
        reader.require("factor", 1.0, "rope_type default does not scale")
        spec = RopeSpec(theta=theta)
    else:
        raise UnsupportedError(
            f"{reader.where}: rope_type={kind!r} is not supported; default and yarn are."
        )
    reader.refuse_unknown(())
    return spec


def _theta(config: ConfigReader, table: ConfigReader | None) -> float:
    inner = table is not None and table.has("rope_theta")
    outer = config.has("rope_theta")
    if not inner and not outer:
        raise CheckpointError(
            f"{config.where} has no rope_theta, neither in rope_parameters nor beside "
            "rope_scaling. Add the value the model was trained with."
        )
    values = []
    if inner and table is not None:
        values.append(table.number("rope_theta", low=1.0))
    if outer:
        values.append(config.number("rope_theta", low=1.0))
    if values[0] != values[-1]:
        raise CheckpointError(
            f"{config.where}: rope_theta={values[-1]!r} contradicts the rope_theta={values[0]!r} "
            "of rope_parameters. Keep the one the model was trained with."
        )
    return values[0]


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
