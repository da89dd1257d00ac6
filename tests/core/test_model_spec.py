"""Parameter counts and KV bytes of the published models, exact."""

import json
from pathlib import Path

import pytest

from moestro.core.model_config import parse_model_config
from moestro.core.model_spec import ModelSpec

DATA = Path(__file__).parent / "data"


def spec(name: str) -> ModelSpec:
    return parse_model_config(json.loads((DATA / f"hub_{name}.json").read_text()))


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("hy3", 295_033_543_488, 20_675_730_240),
        ("hy3_preview", 295_033_543_488, 20_675_730_240),
        ("hy_mt2_30b_a3b", 30_064_725_888, 3_451_867_008),
        ("qwen3_30b_a3b", 30_532_122_624, 3_353_032_704),
        ("qwen3_235b_a22b", 235_093_634_560, 22_190_763_520),
        ("qwen3_coder_480b_a35b", 480_154_875_392, 35_474_765_312),
        ("qwen3_coder_30b_a3b", 30_532_122_624, 3_353_032_704),
    ],
)
def test_parameters(name: str, total: int, active: int) -> None:
    assert spec(name).num_parameters == total
    assert spec(name).num_active_parameters == active


def test_parts_of_hy3() -> None:
    hy3 = spec("hy3")
    assert hy3.num_attention_parameters == 75_497_728
    assert hy3.num_layer_parameters(False) == 239_083_776
    assert hy3.num_layer_parameters(True) == 3_719_045_568
    assert hy3.num_mtp_parameters == 3_752_612_288
    assert hy3.num_parameters + hy3.num_mtp_parameters == 298_786_155_776
    table = hy3.vocab_size * hy3.hidden_size
    assert hy3.num_active_parameters - table == 20_180_802_368


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("hy3", 327_680),
        ("hy_mt2_30b_a3b", 98_304),
        ("qwen3_30b_a3b", 98_304),
        ("qwen3_235b_a22b", 192_512),
        ("qwen3_coder_480b_a35b", 253_952),
    ],
)
def test_kv_bytes_per_token(name: str, kv_bytes: int) -> None:
    assert spec(name).kv_bytes_per_token(2) == kv_bytes
    assert spec(name).kv_bytes_per_token(1) * 2 == kv_bytes


def test_tied_embeddings_count_once() -> None:
    values = json.loads((DATA / "hub_hy3.json").read_text())
    tied = parse_model_config(values | {"tie_word_embeddings": True})
    assert spec("hy3").num_parameters - tied.num_parameters == 120832 * 4096
