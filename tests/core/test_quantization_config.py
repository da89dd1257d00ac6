"""quantization_config: what is read, and that all else is refused with its value."""

from typing import Any

import pytest

from moestro.core.quantization_config import StoredQuantization, StoredScheme, read_quantization
from moestro.core.weight_format import WeightFormat
from moestro.errors import CheckpointError, MoestroError, UnsupportedError

DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
W8A8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


def compressed(
    weights: dict[str, Any], format_name: str, inputs: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        **more,
    }


def read(config: dict[str, Any]) -> StoredQuantization:
    found = read_quantization(config)
    assert found is not None
    return found


def scheme(config: dict[str, Any]) -> StoredScheme:
    return read(config).groups[0][1]


def test_compressed_tensors() -> None:
    assert scheme(compressed(W8A8, "int-quantized", DYNAMIC)) == StoredScheme("w8a8", "channel")
    assert scheme(compressed(W4, "pack-quantized")) == StoredScheme("w4a8", "group", 128)
    asymmetric = compressed(W4 | {"symmetric": False}, "pack-quantized", DYNAMIC)
    assert scheme(asymmetric) == StoredScheme("w4a8", "group", 128, has_zeros=True)
    assert scheme(compressed(FP8, "float-quantized")) == StoredScheme("fp8", "channel")
    block = FP8 | {"strategy": "block", "block_structure": [128, 128]}
    assert scheme(compressed(block, "float-quantized")).block == (128, 128)
    block = FP8 | {"strategy": "block", "block_structure": "128x64"}
    assert scheme(compressed(block, "naive-quantized")).block == (128, 64)


def test_what_runs_otherwise_is_noted() -> None:
    w4a16 = read(compressed(W4, "pack-quantized"))
    assert w4a16.notes == (
        "w4a8: activations are rounded to int8 per token; the checkpoint asks for 16 bits",
    )
    assert read(compressed(W8A8, "int-quantized", DYNAMIC)).notes == ()
    static = read(compressed(W8A8, "int-quantized", DYNAMIC | {"dynamic": False}))
    assert "static activation scales are not used" in static.notes[0]
    w4afp8 = read(compressed(W4, "pack-quantized", DYNAMIC | {"type": "float"}))
    assert "8 bits of type float" in w4afp8.notes[0]


def test_fp8_of_hy3_and_qwen() -> None:
    hy3 = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "ignored_layers": ["lm_head", "model.embed_tokens"],
        "kv_cache_scheme": "static",
    }
    found = read(hy3)
    assert found.groups[0][1] == StoredScheme("fp8", "tensor")
    assert len(found.notes) == 3
    assert found.scheme_of("lm_head") is None
    assert found.scheme_of("model.layers.3.mlp.experts.7.up_proj") == StoredScheme("fp8", "tensor")
    qwen = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
    }
    found = read(qwen)
    assert found.groups[0][1].block == (128, 128)
    assert found.scheme_of("model.layers.0.mlp.gate") is None
    assert found.scheme_of("model.layers.0.mlp.gate_proj") is not None, "gate is no prefix"
    assert found.scheme_of("model.layers.0.mlp.experts.0.gate_proj") is not None


def test_ignored_and_targets() -> None:
    config = compressed(W8A8, "int-quantized", DYNAMIC)
    config["config_groups"]["group_0"]["targets"] = ["re:.*experts.*"]
    config["config_groups"]["group_1"] = {
        "targets": ["model.layers.0.self_attn.o_proj"], "weights": FP8, "format": "float-quantized"
    }  # fmt: skip
    found = read(config)
    assert found.scheme_of("model.layers.1.mlp.experts.0.up_proj") == StoredScheme(
        "w8a8", "channel"
    )
    assert found.scheme_of("model.layers.0.self_attn.o_proj") == StoredScheme("fp8", "channel")
    assert found.scheme_of("model.layers.0.self_attn.q_proj") is None
    assert found.scheme_of("model.layers.1.mlp.gate") is None
    assert found.scheme_found("model.layers.0.self_attn.q_proj", "fp8") is not None
    assert found.scheme_found("model.layers.0.self_attn.o_proj", "w8a8") is None


@pytest.mark.parametrize(
    ("stored", "columns", "wanted"),
    [(128, 256, 128), (64, 256, 64), (32, 96, 32), (256, 512, 128), (96, 192, 32), (0, 192, 64)],
)
def test_groups_become_run_time_groups(stored: int, columns: int, wanted: int) -> None:
    made = StoredScheme("w4a8", "group" if stored else "channel", stored)
    assert made.format_for(columns) == WeightFormat("w4a8", wanted)


def test_groups_that_cannot_be_cut() -> None:
    with pytest.raises(UnsupportedError, match="64 columns in groups of 16"):
        StoredScheme("w4a8", "group", 16).format_for(64)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptq"}, "quant_method='gptq'"),
        ({"quant_method": "modelopt"}, "quant_method='modelopt'"),
        ({"fmt": "e4m3"}, "lacks 'quant_method'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "two whole numbers"),
        ({"quant_method": "fp8", "weight_block_size": [128, 20]}, "multiple of 32 columns"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "static or dynamic"),
        ({"quant_method": "fp8", "surprise": 1}, "surprise"),
        ({"quant_method": "fp8", "ignored_layers": [1]}, "list of names"),
        (compressed(W4, "marlin-24"), "format='marlin-24'"),
        (compressed(W8A8 | {"num_bits": 4}, "int-quantized"), "num_bits=4"),
        (compressed(W4 | {"num_bits": 8}, "pack-quantized"), "num_bits=8"),
        (compressed(W8A8 | {"strategy": "tensor"}, "int-quantized"), "strategy='tensor'"),
        (compressed(W8A8 | {"symmetric": False}, "int-quantized"), "symmetric=false"),
        (compressed(W4 | {"actorder": "group"}, "pack-quantized"), "actorder='group'"),
        (compressed(W4 | {"surprise": 1}, "pack-quantized"), "surprise"),
        (compressed(W8A8 | {"group_size": 128}, "int-quantized"), "contradicts strategy=channel"),
        (compressed(W8A8, "int-quantized", sparsity_config={"format": "x"}), "sparsity_config"),
        (compressed(W8A8, "int-quantized", transform_config={"a": 1}), "transform_config"),
        (compressed(W8A8, "int-quantized", config_groups={}), "lacks config_groups"),
        (compressed(W8A8, "int-quantized", config_groups={"a": 3}), "is no object"),
        (compressed(W8A8, "int-quantized", ignore=["re:("]), "is no pattern"),
    ],
)
def test_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(MoestroError) as caught:
        read_quantization(config)
    assert words in str(caught.value)


def test_no_object() -> None:
    assert read_quantization(None) is None
    assert read_quantization({}) is None
    with pytest.raises(CheckpointError, match="is no object"):
        read_quantization("fp8")
