"""Every spelling loads to identical bits; everything wrong is reported at once."""

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.weights.parameter_holder import ParameterHolder
from tests.weights.spellings import (
    SPELLINGS,
    Tensors,
    hub_tensors,
    tiny_spec,
    write_sharded,
    write_single,
)

from moestro.core.model_spec import ModelSpec
from moestro.errors import CheckpointError
from moestro.weights.loader import load_weights

MODEL_TYPES = ["hy_v3", "qwen3_moe"]


def load(spec: ModelSpec, folder: Path, dtype: torch.dtype = torch.float32) -> Tensors:
    return load_into(ParameterHolder(spec, dtype), folder)


def load_into(holder: ParameterHolder, folder: Path) -> Tensors:
    load_weights(holder.spec, holder.state_dict(), folder)
    return dict(holder.state_dict())


def expected(spec: ModelSpec, hub: Tensors, dtype: torch.dtype) -> Tensors:
    """The parameters, put together by hand from separate tensors."""

    def rows(*names: str) -> torch.Tensor:
        return torch.cat([hub[n] for n in names]).to(dtype)

    result = {n: hub[n].to(dtype) for n in ("model.embed_tokens.weight", "model.norm.weight")}
    if not spec.tie_word_embeddings:
        result["lm_head.weight"] = hub["lm_head.weight"].to(dtype)
    for i in range(spec.num_hidden_layers + spec.num_mtp_layers):
        p = f"model.layers.{i}."
        same = ("input_layernorm", "post_attention_layernorm", "self_attn.o_proj",
                "self_attn.q_norm", "self_attn.k_norm", "enorm", "hnorm", "final_layernorm",
                "eh_proj")  # fmt: skip
        for name in same:
            if f"{p}{name}.weight" in hub:
                result[f"{p}{name}.weight"] = hub[f"{p}{name}.weight"].to(dtype)
        qkv = [f"{p}self_attn.{x}_proj.weight" for x in "qkv"]
        result[f"{p}self_attn.qkv_proj.weight"] = rows(*qkv)
        mlp = f"{p}mlp."
        if f"{mlp}gate_proj.weight" in hub:
            gate_up = rows(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight")
            result[f"{mlp}gate_up_proj.weight"] = gate_up
            result[f"{mlp}down_proj.weight"] = hub[f"{mlp}down_proj.weight"].to(dtype)
            continue
        hy = spec.model_type == "hy_v3"
        router = f"{mlp}router.gate.weight" if hy else f"{mlp}gate.weight"
        result[f"{mlp}gate.weight"] = hub[router].float()
        if hy:
            result[f"{mlp}expert_bias"] = hub[f"{mlp}expert_bias"]
            shared = f"{mlp}shared_mlp."
            result[f"{mlp}shared_experts.gate_up_proj.weight"] = rows(
                f"{shared}gate_proj.weight", f"{shared}up_proj.weight"
            )
            down = hub[f"{shared}down_proj.weight"].to(dtype)
            result[f"{mlp}shared_experts.down_proj.weight"] = down
        assert spec.moe is not None
        each = [f"{mlp}experts.{e}." for e in range(spec.moe.num_experts)]
        result[f"{mlp}experts.gate_up_proj"] = torch.stack(
            [rows(f"{e}gate_proj.weight", f"{e}up_proj.weight") for e in each]
        )
        result[f"{mlp}experts.down_proj"] = torch.stack(
            [hub[f"{e}down_proj.weight"].to(dtype) for e in each]
        )
    return result


def assert_same_bits(left: Tensors, right: Tensors) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        a, b = left[name].contiguous(), right[name].contiguous()
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_loads_to_the_same_bits(
    spelling: str, model_type: str, tmp_path: Path
) -> None:
    spec = tiny_spec(model_type)
    hub = hub_tensors(spec, torch.float32)
    folder = write_single(tmp_path, SPELLINGS[spelling](hub, spec))
    assert_same_bits(load(spec, folder), expected(spec, hub, torch.float32))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    spec = tiny_spec()
    hub = hub_tensors(spec, stored)
    got = load(spec, write_single(tmp_path, hub), wanted)
    assert_same_bits(got, expected(spec, hub, wanted))
    assert got["model.layers.1.mlp.gate.weight"].dtype == torch.float32
    assert got["model.layers.1.mlp.expert_bias"].dtype == torch.float32


def test_close_biases_keep_their_difference(tmp_path: Path) -> None:
    """Two biases nearer than a bf16 step stay two values in a bf16 model."""
    spec = tiny_spec()
    hub = hub_tensors(spec)
    hub["model.layers.1.mlp.expert_bias"] = torch.tensor([0.5, 0.5 + 1e-6, 0, 0, 0])
    got = load(spec, write_single(tmp_path, hub), torch.bfloat16)
    bias = got["model.layers.1.mlp.expert_bias"]
    assert bias[0] < bias[1]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_experts_of_one_layer_over_three_shards(model_type: str, tmp_path: Path) -> None:
    spec = tiny_spec(model_type)
    hub = hub_tensors(spec)
    shards: list[Tensors] = [{}, {}, {}]
    for i, (name, tensor) in enumerate(sorted(hub.items())):
        shards[i % 3][name] = tensor
    got = load(spec, write_sharded(tmp_path, shards), torch.bfloat16)
    assert_same_bits(got, expected(spec, hub, torch.bfloat16))


def test_layer_numbers_are_not_prefixes(tmp_path: Path) -> None:
    """Layers 1 and 10, and an MTP layer 12, are told apart."""
    spec = tiny_spec(num_hidden_layers=12, moe_layers=(False, *(True,) * 11))
    hub = hub_tensors(spec)
    got = load(spec, write_single(tmp_path, hub), torch.bfloat16)
    assert_same_bits(got, expected(spec, hub, torch.bfloat16))


def test_report_and_progress(tmp_path: Path) -> None:
    spec = tiny_spec()
    hub = hub_tensors(spec)
    half = len(hub) // 2
    shards = [dict(list(hub.items())[:half]), dict(list(hub.items())[half:])]
    calls: list[tuple[int, int]] = []
    report = load_weights(
        spec,
        ParameterHolder(spec, torch.bfloat16).state_dict(),
        write_sharded(tmp_path, shards),
        lambda done, total: calls.append((done, total)),
    )
    total = sum(t.nbytes for t in hub.values())
    assert report.num_bytes == total
    assert report.num_tensors == len(hub)
    assert report.files == tuple(f"model-{i:05}-of-00002.safetensors" for i in (1, 2))
    assert report.notes == ()
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)


def test_harmless_extras_are_ignored(tmp_path: Path) -> None:
    spec = tiny_spec()
    hub = hub_tensors(spec)
    hub["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    hub["model.rotary_emb.inv_freq"] = torch.zeros(2, dtype=torch.float64)
    hub["model.layers.3.shared_head.norm.weight"] = torch.zeros(8)
    hub["model.layers.3.shared_head.head.weight"] = torch.zeros(19, 8)
    hub["model.layers.3.embed_tokens.weight"] = torch.zeros(19, 8)
    load(spec, write_single(tmp_path, hub))


def refuse(spec: ModelSpec, tensors: Tensors, folder: Path) -> str:
    model = ParameterHolder(spec, torch.float32)
    with pytest.raises(CheckpointError) as info:
        load_into(model, write_single(folder, tensors))
    assert all(t.isnan().all() for t in model.state_dict().values()), "refused before any write"
    return str(info.value)


def test_all_problems_at_once(tmp_path: Path) -> None:
    spec = tiny_spec()
    hub = hub_tensors(spec)
    for layer in (1, 2):
        for expert in range(5):
            del hub[f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"]
    del hub["model.layers.2.mlp.expert_bias"]
    hub["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(24)
    hub["model.layers.7.input_layernorm.weight"] = torch.zeros(8)
    hub["model.norm.weight"] = torch.zeros(9)
    hub["lm_head.weight"] = hub["lm_head.weight"].to(torch.float8_e4m3fn)
    hub["model.layers.1.mlp.gate.weight"] = hub["model.layers.1.mlp.router.gate.weight"].clone()
    message = refuse(spec, hub, tmp_path)
    for line in (
        "11 tensors missing:",
        "  model.layers.{1,2}.mlp.experts.{0..4}.up_proj.weight (10)",
        "  model.layers.2.mlp.expert_bias",
        "2 tensors unexpected:",
        "  model.layers.0.self_attn.q_proj.bias",
        "  model.layers.7.input_layernorm.weight",
        "1 tensors of a wrong shape:",
        "  model.norm.weight is [9], the config asks for [8]",
        "1 tensors given twice:",
        "1 tensors of dtype F8_E4M3 (this build loads F32, BF16, F16):",
        "  lm_head.weight",
    ):
        assert line in message.splitlines()


def test_missing_is_named_as_the_hub_names_it(tmp_path: Path) -> None:
    spec = tiny_spec("qwen3_moe")
    hub = hub_tensors(spec)
    del hub["model.layers.1.mlp.gate.weight"]
    assert "\n  model.layers.1.mlp.gate.weight" in refuse(spec, hub, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.router.gate.weight",
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.1.mlp.experts.5.up_proj.weight",
        "model.layers.01.input_layernorm.weight",
        "model.layers.1.mlp.gate_proj_bias",
        "model.layers.1.mlp.experts.0.gate_proj.weight_scale",
        "model.layers.1.enorm.weight",
        "transformer.wte.weight",
        "layers.0.input_layernorm.weight",
        "",
    ],
)
def test_unexpected(name: str, tmp_path: Path) -> None:
    spec = tiny_spec()
    hub = hub_tensors(spec) | {name: torch.zeros(3)}
    assert f"1 tensors unexpected:\n  {name}" in refuse(spec, hub, tmp_path)


def test_bias_and_shared_expert_are_unexpected_in_qwen3(tmp_path: Path) -> None:
    spec = tiny_spec("qwen3_moe")
    extra = {
        "model.layers.1.mlp.expert_bias": torch.zeros(5),
        "model.layers.1.mlp.shared_mlp.up_proj.weight": torch.zeros(6, 8),
    }
    assert "2 tensors unexpected" in refuse(spec, hub_tensors(spec) | extra, tmp_path)


def test_fused_and_separate_together_are_given_twice(tmp_path: Path) -> None:
    spec = tiny_spec()
    hub = hub_tensors(spec)
    both = hub | SPELLINGS["fused_qkv"](hub, spec) | SPELLINGS["hub_stacked"](hub, spec)
    message = refuse(spec, both, tmp_path)
    assert "given twice" in message
    assert "model.layers.1.self_attn.qkv_proj.weight" in message


def test_tied_head(tmp_path: Path) -> None:
    spec = tiny_spec(tie_word_embeddings=True)
    hub = hub_tensors(spec)
    assert "lm_head.weight" not in hub
    table = hub["model.embed_tokens.weight"]
    table[0, 0] = float("nan")
    load(spec, write_single(tmp_path / "without", hub))
    hub["lm_head.weight"] = table.clone()
    got = load(spec, write_single(tmp_path / "equal", hub))
    assert "lm_head.weight" not in got
    for wrong in (table + 1, table.float(), table[:5].clone()):
        hub["lm_head.weight"] = wrong
        assert "lm_head.weight differs from" in refuse(spec, hub, tmp_path / "differs")


def trunk_only(hub: Tensors) -> Tensors:
    return {n: t for n, t in hub.items() if not n.startswith("model.layers.3.")}


def test_promised_mtp_layer_is_absent(tmp_path: Path) -> None:
    spec = tiny_spec()
    folder = write_single(tmp_path, trunk_only(hub_tensors(spec)))
    report = load_weights(
        spec, ParameterHolder(spec, torch.float32, num_mtp_layers=0).state_dict(), folder
    )
    assert report.notes == ("no MTP layer: the config promises 1, the checkpoint has none",)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.eh_proj\.weight"):
        load_weights(spec, ParameterHolder(spec, torch.float32).state_dict(), folder)


def test_mtp_layer_may_be_left_out(tmp_path: Path) -> None:
    spec = tiny_spec()
    folder = write_single(tmp_path, hub_tensors(spec))
    report = load_weights(
        spec, ParameterHolder(spec, torch.float32, num_mtp_layers=0).state_dict(), folder
    )
    assert report.notes == ("the MTP layer was left out",)


def test_mtp_layer_partly_there(tmp_path: Path) -> None:
    spec = tiny_spec()
    hub = hub_tensors(spec)
    del hub["model.layers.3.hnorm.weight"]
    message = refuse(spec, hub, tmp_path)
    assert "1 tensors missing:\n  model.layers.3.hnorm.weight" in message


def test_mtp_layer_nobody_promised(tmp_path: Path) -> None:
    spec = tiny_spec()
    silent = dataclasses.replace(spec, num_mtp_layers=0)
    message = refuse(silent, hub_tensors(spec), tmp_path)
    assert "unexpected" in message
    assert "model.layers.3.eh_proj.weight" in message


def test_overflow_of_float16(tmp_path: Path) -> None:
    spec = tiny_spec()
    hub = hub_tensors(spec)
    hub["model.layers.0.self_attn.k_proj.weight"][0, 0] = -1e6
    folder = write_single(tmp_path, hub)
    with pytest.raises(CheckpointError, match=r"k_proj\.weight' reaches 999424.*65504"):
        load(spec, folder, torch.float16)
    load(spec, folder, torch.bfloat16)


def test_old_hunyuan_is_noted(tmp_path: Path) -> None:
    spec = tiny_spec()
    folder = write_single(tmp_path, SPELLINGS["old_hunyuan"](hub_tensors(spec), spec))
    report = load_weights(spec, ParameterHolder(spec, torch.float32).state_dict(), folder)
    assert "interleaved" in report.notes[0]


def test_model_that_disagrees_with_the_map(tmp_path: Path) -> None:
    spec = tiny_spec()
    model = ParameterHolder(spec, torch.float32)
    model.add("model.layers.0.surprise.weight", 3)
    with pytest.raises(CheckpointError, match=r"unknown to the name map:\n  model\.layers\.0\.sur"):
        load_into(model, write_single(tmp_path, hub_tensors(spec)))
