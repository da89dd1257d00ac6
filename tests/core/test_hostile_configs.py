"""Every key of a config with every kind of nonsense: read, or refused in a short message."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moestro.core.generation_config import parse_generation_config
from moestro.core.model_config import parse_model_config
from moestro.errors import MoestroError

DATA = Path(__file__).parent / "data"
BASES = ("hub_hy3", "hub_qwen3_30b_a3b", "hf_hy_v3_tiny_saved", "hf_qwen3_moe_tiny_yarn_saved")
MORE_KEYS = (
    *("layer_types", "mlp_layer_types", "first_k_dense_replace", "num_local_experts", "n_group"),
    *("rope_scaling", "rope_parameters", "rope_theta", "original_max_position_embeddings"),
    *("quantization_config", "is_decoder", "architectures", "sliding_window", "dtype"),
)
GENERATION_KEYS = {  # key: the name in messages
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "do_sample": "do_sample",
    "eos_token_id": "eos_token_id",
}
NONSENSE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 2**31, 10**12, 10**400, 10**5000, -(10**400)),
    *(0.0, 0.5, -1.0, 1e308, 5e-324, float("nan"), float("inf")),
    *("", "silu", "x" * 100_000, "\ud800", "\0", "a\x1b[31m", "full_attention"),
    *([], [1], [None], [[]], [{}], ["x"] * 100_000, ["full_attention"], {}, {"a": 1}),
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1e308},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1e300, "beta_fast": "x" * 100_000},
    {"rope_type": "x" * 100_000, "rope_theta": 1e4},
    {"quant_method": "x" * 100_000},
)
MAX_MESSAGE_CHARS = 1000


def hostile(base: str) -> Iterator[dict[str, Any]]:
    values: dict[str, Any] = json.loads((DATA / f"{base}.json").read_text())
    for key in sorted({*values, *MORE_KEYS}):
        for nonsense in NONSENSE:
            yield {**values, key: nonsense}
    for table in ("rope_parameters", "rope_scaling"):
        yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
        for key in (*yarn, "original_max_position_embeddings", "beta_slow", "truncate", "type"):
            for nonsense in NONSENSE:
                yield {**values, table: {**yarn, key: nonsense}}


def refusal(read: Callable[[], object]) -> str:
    """The message of the package's error; "" when there is none."""
    try:
        read()
    except MoestroError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("base", BASES)
def test_model_config(base: str) -> None:
    for values in hostile(base):
        assert len(refusal(partial(parse_model_config, values))) <= MAX_MESSAGE_CHARS


def test_generation_config() -> None:
    for key, told in GENERATION_KEYS.items():
        for nonsense in NONSENSE:
            message = refusal(partial(parse_generation_config, {key: nonsense}, vocab_size=100))
            assert not message or told in message
            assert len(message) <= MAX_MESSAGE_CHARS
