"""Quantised checkpoints: every layout loads to the values it stands for; damage is named."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bench.make_model import make_model, parse_args
from bench.make_quantized import KINDS, Options, make_quantized
from safetensors.torch import load_file, save_file

from moestro import LLM, SamplingParams
from moestro.config import EngineConfig
from moestro.core.model_config import load_model_spec
from moestro.core.weight_format import WeightFormat
from moestro.errors import CheckpointError, ConfigError
from moestro.layers.parameters import Parameter, Parameters
from moestro.models.registry import build_model
from moestro.planner.weight_formats import choose_weight_formats
from moestro.quant import values
from moestro.weights.checkpoint import Checkpoint
from moestro.weights.loader import LoadReport, load_weights, stored_formats

SMALL = [
    "--model-type=hy_v3", "--hidden-size=192", "--num-layers=2", "--num-heads=4",
    "--num-kv-heads=2", "--head-dim=40", "--num-experts=4", "--top-k=2",
    "--moe-intermediate-size=96", "--intermediate-size=160", "--vocab-size=300",
    "--dtype=float32",
]  # fmt: skip
WANTED = {
    "hy3-fp8": WeightFormat("fp8"),
    "fp8-block": WeightFormat("fp8", 128),
    "fp8-channel": WeightFormat("fp8"),
    "w8a8": WeightFormat("w8a8"),
    "w4a16": WeightFormat("w4a8", 32),
    "w4a16-asym": WeightFormat("w4a8", 32, has_zeros=True),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(parse_args([str(tmp_path_factory.mktemp("float") / "m"), *SMALL]))


def load(
    folder: Path, dtype: torch.dtype = torch.float32, **options: object
) -> tuple[dict[str, Parameter], LoadReport]:
    """As the engine does it, in the rows layout."""
    spec = load_model_spec(folder)
    with Checkpoint.open(folder) as checkpoint:
        stored = stored_formats(checkpoint, spec, 1) or None
    name = str(dtype).removeprefix("torch.")
    formats, _ = choose_weight_formats(spec, EngineConfig(**options), name, 1, stored)
    model = build_model(spec, Parameters(dtype, formats))
    return dict(model.weights), load_weights(spec, model.weights, folder)


def floats(parameter: Parameter) -> torch.Tensor:
    return parameter if isinstance(parameter, torch.Tensor) else values(parameter)


@pytest.mark.parametrize("kind", KINDS)
def test_loads_to_the_values_it_stands_for(kind: str, source: Path, tmp_path: Path) -> None:
    make_quantized(source, tmp_path / "q", kind, Options(), tmp_path / "float")
    got, report = load(tmp_path / "q")
    wanted, _ = load(tmp_path / "float")
    assert got.keys() == wanted.keys()
    for name, parameter in got.items():
        assert torch.equal(floats(parameter), floats(wanted[name])), name
    experts = got["model.layers.1.mlp.experts.gate_up_proj"]
    assert not isinstance(experts, torch.Tensor)
    assert experts.format == WANTED[kind]
    head = got["lm_head.weight"]
    assert not isinstance(head, torch.Tensor)
    assert head.format.is_float
    unused = [n for n in report.notes if "not used" in n]
    assert len(unused) == (kind == "hy3-fp8")


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hy3_fp8_scales(
    shape: tuple[int, ...], dtype: torch.dtype, source: Path, tmp_path: Path
) -> None:
    options = Options(scale_dtype=dtype, scale_shape=shape)
    make_quantized(source, tmp_path / "q", "hy3-fp8", options, tmp_path / "float")
    got, wanted = load(tmp_path / "q")[0], load(tmp_path / "float")[0]
    assert all(torch.equal(floats(p), floats(wanted[n])) for n, p in got.items())


@pytest.mark.parametrize("quantization", ["w8a8", "w4a8", "fp8"])
def test_a_float_checkpoint_is_quantised_at_load(quantization: str, source: Path) -> None:
    got, _ = load(source, torch.bfloat16, quantization=quantization)
    wanted, _ = load(source)
    for name, parameter in got.items():
        error = (floats(parameter).float() - floats(wanted[name])).norm()
        share = (error / floats(wanted[name]).norm()).item()
        assert share < {"w8a8": 0.01, "w4a8": 0.12, "fp8": 0.04}[quantization], name


Change = Callable[[dict[str, torch.Tensor]], None]
MODULE = "model.layers.1.mlp.experts.2.up_proj"


def _set_scale(value: float) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        scales = tensors[f"{MODULE}.weight_scale"]
        scales.view(-1)[-1] = value

    return change


def _delete(leaf: str) -> Change:
    return lambda tensors: tensors.__delitem__(f"{MODULE}.{leaf}") and None


def _replace(leaf: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: tensors.__setitem__(f"{MODULE}.{leaf}", tensor)


def _stack(codes: str, scales: str) -> Change:
    """The experts of MODULE's layer in one tensor, as transformers holds them in memory."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        experts = MODULE[: MODULE.index("experts.") + len("experts.")]
        own = [n for n in tensors if n.startswith(experts) and ".gate_proj." in n]
        stacked = torch.stack([tensors[n] for n in own if n.endswith(".weight")])
        for name in own:
            del tensors[name]
        tensors[f"{experts}{codes}"] = stacked
        tensors[f"{experts}{scales}"] = torch.ones(len(stacked), stacked.shape[1], 1)

    return change


def _nan_code(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{MODULE}.weight"].view(torch.uint8)[3, 5] = 0xFF


def _unquantize(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{MODULE}.weight"] = tensors.pop(f"{MODULE}.weight_scale").expand(-1, 192).clone()


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("w8a8", _set_scale(math.nan), r"up_proj\.weight_scale' holds the scale nan"),
        ("w8a8", _set_scale(math.inf), "holds the scale inf"),
        ("w8a8", _set_scale(-1.0), "holds the scale -1"),
        ("w4a16", _set_scale(math.nan), "holds the scale nan"),
        ("hy3-fp8", _set_scale(-math.inf), "holds the scale -inf"),
        ("hy3-fp8", _nan_code, r"up_proj\.weight' holds NaN codes"),
        ("hy3-fp8", _delete("weight_scale"), r"without its scales:\n  .*2\.up_proj\.weight"),
        ("w8a8", _delete("weight_scale"), "without its scales"),
        ("w4a16-asym", _delete("weight_zero_point"), "without its zero points"),
        ("w8a8", _delete("weight"), "missing:\n  .*up_proj.weight(.|\n)*not quantised:"),
        (
            "w8a8",
            _replace("weight_scale", torch.ones(7, 1)),
            r"up_proj\.weight_scale is \[7, 1\], channel scales are \[96, 1\] or \[96\]",
        ),
        ("w8a8", _replace("weight_scale", torch.ones(96, 1, dtype=torch.int8)), "of a dtype other"),
        ("w8a8", _replace("weight_zero_point", torch.ones(96, 1, dtype=torch.int8)), "not 0"),
        ("w4a16", _replace("weight_g_idx", torch.zeros(192, dtype=torch.int32)), "act-order"),
        ("w4a16", _replace("weight_packed", torch.zeros(96, 3, dtype=torch.int32)), "wrong shape"),
        (
            "w8a8",
            _stack("gate_up_proj", "gate_up_proj_scale"),
            r"quantised experts in one stack .*\n.*experts\.gate_up_proj I8 \[",
        ),
        (
            "w8a8",
            _stack("gate_up_proj.weight", "gate_up_proj.weight_scale"),
            r"quantised experts in one stack .*\n.*experts\.gate_up_proj\.weight I8 \[",
        ),
        ("w8a8", _unquantize, "parts of one weight are stored in diff"),
    ],
)
def test_damage_is_named(
    kind: str, change: Change, words: str, source: Path, tmp_path: Path
) -> None:
    folder = make_quantized(source, tmp_path, kind, Options())
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=words):
        load(folder)


def test_zero_scales_are_rows_of_zeros(source: Path, tmp_path: Path) -> None:
    folder = make_quantized(source, tmp_path, "w8a8", Options())
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    tensors[f"{MODULE}.weight_scale"][4] = 0
    save_file(tensors, file)
    experts = load(folder)[0]["model.layers.1.mlp.experts.gate_up_proj"]
    assert not floats(experts)[2, 96 + 4].any()


def test_formats_follow_the_files_not_the_config(source: Path, tmp_path: Path) -> None:
    """A weight that the config calls quantised and the files hold as floats stays a float."""
    make_quantized(source, tmp_path / "q", "hy3-fp8", Options(), tmp_path / "float")
    file = next((tmp_path / "q").glob("*.safetensors"))
    tensors = load_file(file)
    name = "model.layers.1.self_attn.o_proj"
    del tensors[f"{name}.weight_scale"], tensors[f"{name}.input_scale"]
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].bfloat16()
    save_file(tensors, file)
    got = load(tmp_path / "q")[0][f"{name}.weight"]
    assert not isinstance(got, torch.Tensor)
    assert got.format == WeightFormat("float32")


def test_router_may_not_be_quantised(source: Path, tmp_path: Path) -> None:
    folder = make_quantized(source, tmp_path, "hy3-fp8", Options())
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    name = "model.layers.1.mlp.router.gate.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale"] = torch.ones(1)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"gate\.weight is fp8, .* is a float tensor"):
        load(folder)


def test_scheme_that_the_config_does_not_say(source: Path, tmp_path: Path) -> None:
    folder = make_quantized(source, tmp_path, "w8a8", Options())
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="stored as w8a8, which quantization_config does not"):
        load(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_runs_it(kind: str, source: Path, tmp_path: Path) -> None:
    folder = make_quantized(source, tmp_path, kind, Options())
    options = {"max_model_len": 64, "kv_cache_memory_bytes": "4MB", "num_threads": 1}
    with LLM(str(folder), **options) as llm:
        assert llm.plan.weight_formats.linear == WANTED[kind]
        assert llm.plan.weight_formats.head == WeightFormat("bfloat16")
        out = llm.generate([[5, 6, 7, 8]], SamplingParams(temperature=0.0, max_tokens=4))
    assert len(out[0].outputs[0].token_ids) == 4
    with pytest.raises(ConfigError, match="quantised already"):
        LLM(str(folder), quantization="w8a8" if "w8a8" not in kind else "fp8", **options)
