"""Which format a weight gets, what that takes, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from moestro.backends import load_backend
from moestro.backends.cpu.library import has_native
from moestro.config import EngineConfig
from moestro.core.matrices import matrices
from moestro.core.model_config import load_model_spec, parse_model_config
from moestro.core.model_spec import ModelSpec
from moestro.core.weight_format import WeightFormat, WeightFormats
from moestro.errors import ConfigError
from moestro.planner.sizes import weight_bytes
from moestro.planner.weight_formats import Stored, choose_weight_formats
from moestro.weights.source import resolve_model

TINY = load_model_spec(resolve_model("tiny-hy3"))
W8A8, BF16 = WeightFormat("w8a8"), WeightFormat("bfloat16")


def spec(name: str) -> ModelSpec:
    path = Path(__file__).parents[1] / "core" / "data" / f"{name}.json"
    return parse_model_config(json.loads(path.read_text()))


def choose(
    model: ModelSpec = TINY, stored: Stored | None = None, **options: Any
) -> tuple[WeightFormats, tuple[str, ...]]:
    return choose_weight_formats(
        model, EngineConfig(**options), "bfloat16", model.num_mtp_layers, stored
    )


def test_float_checkpoint() -> None:
    assert choose() == (WeightFormats.all_float("bfloat16"), ())
    formats, notes = choose(quantization="w4a8", quantization_group_size=64)
    assert formats.of("model.layers.1.mlp.experts.down_proj") == WeightFormat("w4a8", 64)
    assert formats.of("lm_head.weight") == W8A8
    assert formats.of("model.layers.6.eh_proj.weight") == BF16
    assert "lm_head to w8a8" in notes[0]
    formats, _ = choose(quantization="fp8")
    assert formats.of("lm_head.weight") == BF16
    assert formats.of("model.layers.0.mlp.down_proj.weight") == WeightFormat("fp8")


@pytest.mark.parametrize(
    ("quantization", "bits"), [("none", 16), ("w8a8", 8), ("w4a8", 4.5), ("fp8", 8)]
)
def test_bytes(quantization: str, bits: float) -> None:
    hy3 = spec("hub_hy3")
    formats, _ = choose(hy3, quantization=quantization)
    in_bits = 8 * weight_bytes(hy3, formats, 1) / (hy3.num_parameters + hy3.num_mtp_parameters)
    assert bits <= in_bits <= bits * 1.02 + 0.05
    if has_native():
        device = load_backend("cpu")
        for matrix in matrices(hy3, 1):
            weight_format = formats.of(matrix.name)
            packed = device.packed_bytes(weight_format, matrix.shape, paired=False)
            counted = matrix.num_rows * weight_format.row_bytes(matrix.shape[-1])
            assert counted <= packed <= 1.01 * counted, matrix.name


def test_group_size_that_does_not_divide() -> None:
    assert TINY.moe is not None
    odd = dataclasses.replace(TINY, moe=dataclasses.replace(TINY.moe, intermediate_size=96))
    with pytest.raises(ConfigError, match=r"=128 does not divide the 96 columns of model\.layers"):
        choose(odd, quantization="w4a8", quantization_group_size=128)
    choose(odd, quantization="w4a8", quantization_group_size=32)


def test_quantised_checkpoint() -> None:
    hy3 = spec("hub_hy3_fp8")
    formats, notes = choose(hy3)
    fp8 = WeightFormat("fp8")
    assert formats.linear == fp8
    assert formats.of("lm_head.weight") == BF16
    assert any("input_scale" in note for note in notes)
    name = "model.layers.80.self_attn.o_proj.weight"
    stored = {m.name: fp8 for m in matrices(hy3, 1)} | {"lm_head.weight": None, name: None}
    formats, notes = choose(hy3, stored)
    assert formats.of(name) == BF16
    assert "1 weights that config.json calls quantised are bfloat16" in notes[-1]
    assert choose(hy3, quantization="fp8")[0].linear == fp8
    with pytest.raises(ConfigError, match="quantised already, to fp8"):
        choose(hy3, quantization="w8a8")
