"""Defaults that a checkpoint's generation_config.json gives: sampling values and stop ids."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moestro.core.config_reader import ConfigReader
from moestro.core.model_config import read_json_object
from moestro.core.sampling_params import SamplingParams
from moestro.errors import CheckpointError, RequestError

# key of the file: field of SamplingParams; the keys vLLM takes
_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
CHECKPOINT_FIELDS = tuple(_FIELDS.values())
"""Fields of SamplingParams whose default a checkpoint may choose."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """sampling: keywords for SamplingParams, only those the file gives."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()


def load_generation_defaults(model_dir: Path, vocab_size: int | None = None) -> GenerationDefaults:
    """Defaults from the file in `model_dir`; none when it has no such file.

    Raises CheckpointError for broken JSON and for values that sampling would refuse.
    """
    path = model_dir / "generation_config.json"
    if not path.exists():
        return GenerationDefaults()
    return parse_generation_config(read_json_object(path), vocab_size)


def parse_generation_config(
    config: Mapping[str, Any], vocab_size: int | None = None
) -> GenerationDefaults:
    """Defaults from the object of a generation_config.json.

    Other keys of the file steer decoders that don't exist here and are left alone. do_sample
    false asks for greedy text, so it becomes temperature 0 (vLLM ignores it). top_k 0 and -1
    both mean off.
    """
    reader = ConfigReader(config, "generation_config.json")
    sampling = {ours: reader.value(key) for key, ours in _FIELDS.items() if reader.has(key)}
    if not reader.boolean("do_sample", True):
        sampling = {k: v for k, v in sampling.items() if k in ("repetition_penalty", "max_tokens")}
        sampling["temperature"] = 0.0
    try:
        params = SamplingParams(**sampling)
    except RequestError as error:
        raise CheckpointError(
            f"generation_config.json: {error} Correct the file, or ignore it with "
            "generation_config=none."
        ) from None
    values = {name: getattr(params, name) for name in sampling}
    return GenerationDefaults(values, reader.token_ids("eos_token_id", vocab_size))
