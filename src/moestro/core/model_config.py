"""config.json to ModelSpec: what is common to the model families, and the choice between them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moestro.core.config_reader import ConfigReader
from moestro.core.harmless_keys import HARMLESS_KEYS
from moestro.core.hy_v3_config import read_hy_v3
from moestro.core.model_spec import ModelSpec
from moestro.core.quantization_config import read_quantization
from moestro.core.qwen3_moe_config import read_qwen3_moe
from moestro.errors import CheckpointError, UnsupportedError, shown

_FAMILIES: dict[str, tuple[str, Callable[[ConfigReader], ModelSpec]]] = {
    "hy_v3": ("HYV3ForCausalLM", read_hy_v3),
    "qwen3_moe": ("Qwen3MoeForCausalLM", read_qwen3_moe),
}


def load_model_spec(model_dir: Path) -> ModelSpec:
    """The ModelSpec of the checkpoint in `model_dir`.

    Raises CheckpointError (missing, broken or contradictory config.json) and UnsupportedError
    (another architecture, unknown keys, features this version lacks).
    """
    return parse_model_config(read_json_object(model_dir / "config.json"))


def parse_model_config(config: Mapping[str, Any]) -> ModelSpec:
    """The ModelSpec that the object of a config.json describes; errors as load_model_spec."""
    reader = ConfigReader(config, "config.json")
    model_type = reader.text("model_type")
    supported = ", ".join(_FAMILIES)
    if model_type not in _FAMILIES:
        raise UnsupportedError(
            f"config.json: model_type={shown(model_type)} is not supported; supported: {supported}."
        )
    architecture, read = _FAMILIES[model_type]
    found = reader.value("architectures")
    if found is not None and architecture not in (found if isinstance(found, list) else [found]):
        raise UnsupportedError(
            f"config.json: architectures={shown(found)} is not supported for {model_type}; "
            f"only {architecture} is."
        )
    quantization = read_quantization(reader.value("quantization_config"))
    for key in ("is_encoder_decoder", "is_decoder", "add_cross_attention"):
        reader.require(key, False, "models are decoders only")
    spec = read(reader)
    reader.refuse_unknown(HARMLESS_KEYS)
    return replace(spec, quantization=quantization)


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a checkpoint's file. Raises CheckpointError."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"Can't read {path}: it is no regular file.")
    try:
        loaded = json.loads(path.read_bytes(), object_pairs_hook=_unique)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist: {path.parent} is not a checkpoint folder."
        ) from None
    except OSError as error:
        raise CheckpointError(f"Can't read {path}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found a {type(loaded).__name__}.")
    try:
        json.dumps(loaded, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{path} holds half a surrogate pair, which is no text.") from None
    return loaded


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table and table[key] != value:
            raise ValueError(f"the key {shown(key)} stands twice with different values")
        table[key] = value
    return table
