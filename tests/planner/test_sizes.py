"""Bytes of weights against the tensors of a real checkpoint and the published totals."""

import dataclasses
import json
import math
import struct
from pathlib import Path

import pytest

from moestro.core.model_config import load_model_spec, parse_model_config
from moestro.core.model_spec import ModelSpec
from moestro.core.plan import LOGITS_BLOCK_BYTES
from moestro.core.weight_format import WeightFormats
from moestro.planner.sizes import buffer_bytes, weight_bytes

ROOT = Path(__file__).parents[2]
TINY = ROOT / "src/moestro/bundled/tiny-hy3"
DATA = ROOT / "tests/core/data"


def spec(name: str) -> ModelSpec:
    return parse_model_config(json.loads((DATA / f"{name}.json").read_text()))


def test_tiny_hy3_to_the_byte() -> None:
    """Every tensor of the file in bf16, except that routers and biases are held in fp32."""
    with (TINY / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    held = 0
    for name, entry in header.items():
        fp32 = "router.gate" in name or name.endswith("expert_bias")
        held += math.prod(entry["shape"]) * (4 if fp32 else 2)
    assert weight_bytes(load_model_spec(TINY), WeightFormats.all_float("bfloat16"), 1) == held


def test_hy3() -> None:
    hy3 = spec("hub_hy3")
    routers = 79 * (192 * 4096 + 192)
    bf16 = WeightFormats.all_float("bfloat16")
    trunk = weight_bytes(hy3, bf16, 0)
    assert trunk == 2 * 295_033_543_488 + 2 * routers
    assert weight_bytes(hy3, bf16, 1) - trunk == 2 * 3_752_612_288 + 2 * (192 * 4096 + 192)
    assert weight_bytes(hy3, WeightFormats.all_float("float32"), 0) == 4 * 295_033_543_488


def test_model_without_experts() -> None:
    dense = parse_model_config(
        json.loads((DATA / "hub_qwen3_30b_a3b.json").read_text()) | {"num_experts": 0}
    )
    assert weight_bytes(dense, WeightFormats.all_float("float16"), 0) == 2 * dense.num_parameters
    assert buffer_bytes(dense, "float16", 1, 1, 1) > 0


@pytest.mark.parametrize("name", ["hub_hy3", "hub_qwen3_30b_a3b", "hf_hy_v3_tiny_saved"])
def test_buffers_grow_with_what_they_hold(name: str) -> None:
    model = spec(name)
    base = buffer_bytes(model, "bfloat16", 256, 8, 4096)
    assert buffer_bytes(model, "bfloat16", 512, 8, 4096) > base
    few = buffer_bytes(model, "bfloat16", 8, 8, 4096)
    assert buffer_bytes(model, "bfloat16", 8, 16, 4096) >= few + 8 * 4 * model.vocab_size
    assert buffer_bytes(model, "bfloat16", 256, 8, 4097) == base + 4096 * model.head_dim * 4
    assert buffer_bytes(model, "float32", 256, 8, 4096) > base


def test_blocks_of_logits() -> None:
    """A prompt's scores take a block however few sequences run, and no more than a block."""
    model = spec("hub_qwen3_30b_a3b")
    row = 4 * model.vocab_size
    no_head = dataclasses.replace(model, vocab_size=1)

    def logits(num_tokens: int, num_logits: int) -> int:
        small, large = (
            buffer_bytes(m, "bfloat16", num_tokens, num_logits, 1) for m in (no_head, model)
        )
        return large - small

    assert logits(64, 1) == pytest.approx(64 * row, rel=1e-3)
    assert logits(8192, 1) == pytest.approx(LOGITS_BLOCK_BYTES, rel=1e-3)
    assert logits(8192, 128) == pytest.approx(3 * 128 * row, rel=1e-3)
    assert logits(8192, 8192) == pytest.approx(3 * LOGITS_BLOCK_BYTES, rel=1e-3)
