"""Write a quantised copy of a float checkpoint, in the layout of one of the public formats.

    python bench/make_quantized.py SOURCE TARGET --kind fp8-block [--dequantized FOLDER]

Values are rounded to nearest. --dequantized writes the values that the codes stand for, as a
float32 checkpoint: both must compute the same. Shards are kept; one is held in memory at a time.
"""

import argparse
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from moestro.quant import WeightFormat, quantize, values
from moestro.quant.fp8 import LARGEST
from moestro.weights.stored import pack_int32

Tensors = dict[str, torch.Tensor]
BLOCK = 128
# What the public checkpoints quantise: not the router, eh_proj, embedding, head and norms.
QUANTIZED = re.compile(
    r"model\.layers\.\d+\.(self_attn\.[qkvo]|mlp\.(.+\.)?(gate|up|down))_proj\.weight"
)


@dataclass(frozen=True, slots=True)
class Options:
    """group_size: of the 4-bit kinds. scale_dtype and scale_shape: of per-tensor scales."""

    group_size: int = 32
    scale_dtype: torch.dtype = torch.float32
    scale_shape: tuple[int, ...] = (1,)


def _scaled(module: str, codes: torch.Tensor, scales: torch.Tensor) -> Tensors:
    return {f"{module}.weight": codes, f"{module}.weight_scale": scales}


def fp8_tensor(module: str, w: torch.Tensor, options: Options) -> tuple[Tensors, torch.Tensor]:
    """Hy3-FP8: one scale a tensor, and an input scale that nothing here uses."""
    scale = (w.abs().max() / LARGEST).to(options.scale_dtype)
    codes = (w / scale.float()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    made = _scaled(module, codes, scale.reshape(options.scale_shape))
    made[f"{module}.input_scale"] = torch.ones(1)
    return made, codes.float() * scale.float()


def fp8_block(module: str, w: torch.Tensor, _options: Options) -> tuple[Tensors, torch.Tensor]:
    """Qwen and DeepSeek FP8: 128 x 128 blocks, ragged at the edges."""
    rows, columns = w.shape
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    codes, value = torch.empty_like(w, dtype=torch.float8_e4m3fn), torch.empty_like(w)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scales[i, j] = w[at].abs().max() / LARGEST
            codes[at] = (w[at] / scales[i, j]).clamp(-LARGEST, LARGEST).to(codes.dtype)
            value[at] = codes[at].float() * scales[i, j]
    return {f"{module}.weight": codes, f"{module}.weight_scale_inv": scales}, value


def fp8_channel(module: str, w: torch.Tensor, _options: Options) -> tuple[Tensors, torch.Tensor]:
    """compressed-tensors FP8_DYNAMIC: one scale a row."""
    q = quantize(w, WeightFormat("fp8"))
    assert q.scales is not None
    return _scaled(module, q.codes, q.scales), values(q)


def w8a8(module: str, w: torch.Tensor, _options: Options) -> tuple[Tensors, torch.Tensor]:
    """compressed-tensors W8A8."""
    q = quantize(w, WeightFormat("w8a8"))
    assert q.scales is not None
    return _scaled(module, q.codes, q.scales), values(q)


def w4a16(module: str, w: torch.Tensor, options: Options) -> tuple[Tensors, torch.Tensor]:
    """compressed-tensors W4A16, symmetric."""
    return _pack_quantized(module, w, WeightFormat("w4a8", options.group_size))


def w4a16_asym(module: str, w: torch.Tensor, options: Options) -> tuple[Tensors, torch.Tensor]:
    """compressed-tensors W4A16_ASYM: zero points packed along the rows."""
    return _pack_quantized(module, w, WeightFormat("w4a8", options.group_size, has_zeros=True))


def _pack_quantized(
    module: str, w: torch.Tensor, weight_format: WeightFormat
) -> tuple[Tensors, torch.Tensor]:
    q = quantize(w, weight_format)
    assert q.scales is not None
    made = {
        f"{module}.weight_packed": q.codes.view(torch.int32),
        f"{module}.weight_scale": q.scales.bfloat16(),
        f"{module}.weight_shape": torch.tensor(w.shape),
    }
    if q.zeros is not None:
        padded = torch.nn.functional.pad(q.zeros, (0, 0, 0, -len(q.zeros) % 8))
        made[f"{module}.weight_zero_point"] = pack_int32(padded.T.contiguous()).T.contiguous()
    return made, values(q)


def _compressed_tensors(format_name: str, **weights: Any) -> Callable[[Options], dict[str, Any]]:
    def config(options: Options) -> dict[str, Any]:
        group = {"targets": ["Linear"], "weights": {**weights, "dynamic": False}}
        if weights["strategy"] == "group":
            group["weights"]["group_size"] = options.group_size
        inputs = {"num_bits": 8, "type": weights["type"], "strategy": "token", "dynamic": True}
        group["input_activations"] = None if weights["num_bits"] == 4 else inputs
        return {
            "quant_method": "compressed-tensors",
            "format": format_name,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", "re:.*router.gate$", "re:.*mlp.gate$", "re:.*eh_proj$"],
        }

    return config


_HY3_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "ignored_layers": ["lm_head", "model.embed_tokens"],
    "kv_cache_scheme": "static",
}
_FP8_BLOCK = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}
KINDS: dict[str, tuple[Callable[..., tuple[Tensors, torch.Tensor]], Callable[..., Any]]] = {
    "hy3-fp8": (fp8_tensor, lambda _: _HY3_FP8),
    "fp8-block": (fp8_block, lambda _: _FP8_BLOCK),
    "fp8-channel": (
        fp8_channel,
        _compressed_tensors("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "w8a8": (
        w8a8,
        _compressed_tensors("int-quantized", num_bits=8, type="int", strategy="channel"),
    ),
    "w4a16": (
        w4a16,
        _compressed_tensors("pack-quantized", num_bits=4, type="int", strategy="group"),
    ),
    "w4a16-asym": (
        w4a16_asym,
        _compressed_tensors(
            "pack-quantized", num_bits=4, type="int", strategy="group", symmetric=False
        ),
    ),
}


def make_quantized(
    source: Path, target: Path, kind: str, options: Options, dequantized: Path | None = None
) -> Path:
    """Convert a folder; returns target."""
    quantize_one, config_of = KINDS[kind]
    for folder in filter(None, (target, dequantized)):
        folder.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            if file.is_file() and file.suffix in (".json", ".jinja") and "index" not in file.name:
                shutil.copyfile(file, folder / file.name)
    for file in sorted(source.glob("*.safetensors")):
        made: Tensors = {}
        plain: Tensors = {}
        for name, tensor in load_file(file).items():
            if QUANTIZED.fullmatch(name):
                parts, value = quantize_one(name.removesuffix(".weight"), tensor.float(), options)
                made |= parts
                plain[name] = value
            else:
                made[name] = plain[name] = tensor
        save_file({n: t.contiguous() for n, t in made.items()}, target / file.name)
        if dequantized is not None:
            save_file({n: t.contiguous() for n, t in plain.items()}, dequantized / file.name)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = config_of(options)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--dequantized", type=Path)
    args = parser.parse_args()
    options = Options(group_size=args.group_size)
    print(make_quantized(args.source, args.target, args.kind, options, args.dequantized))


if __name__ == "__main__":
    main()
