#!/usr/bin/env python
"""What each format of weights and KV costs tiny-hy3 on its held-out text.

    python bench/accuracy.py                        # perplexity, and KL from bf16
    python bench/accuracy.py --simulate --windows 2 # kernels beside the byte spec in torch
    python bench/accuracy.py --by-part w4a8         # one kind of weight, or one layer, at a time

A window is 2048 tokens, prefilled in two chunks. Loss and KL are against bf16 on the same windows.
--json prints the numbers and nothing else.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.oracle.divergence import mean_kl  # noqa: E402
from tests.oracle.driver import PagedLoop  # noqa: E402
from tests.oracle.heldout import WINDOW, heldout_windows, perplexity, window_nll  # noqa: E402

from moestro import ops  # noqa: E402
from moestro.backends import load_backend  # noqa: E402
from moestro.config import EngineConfig  # noqa: E402
from moestro.core.matrices import matrices  # noqa: E402
from moestro.core.model_config import load_model_spec  # noqa: E402
from moestro.core.weight_format import WeightFormats  # noqa: E402
from moestro.layers.moe import pack_routers  # noqa: E402
from moestro.layers.parameters import Parameters  # noqa: E402
from moestro.models.causal_lm import CausalLM  # noqa: E402
from moestro.models.registry import build_model  # noqa: E402
from moestro.ops.registry import Body, Op  # noqa: E402
from moestro.planner.weight_formats import choose_weight_formats  # noqa: E402
from moestro.quant.kv import KV_DTYPES  # noqa: E402
from moestro.weights.loader import load_weights  # noqa: E402
from moestro.weights.source import resolve_model  # noqa: E402

CHUNKS = (700, WINDOW - 700)
RUNS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "w8a8": {"quantization": "w8a8"},
    "w4a8 g32": {"quantization": "w4a8", "quantization_group_size": 32},
    "w4a8 g64": {"quantization": "w4a8", "quantization_group_size": 64},
    "w4a8 g128": {"quantization": "w4a8", "quantization_group_size": 128},
    "fp8": {"quantization": "fp8"},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "int8 KV, rotated": {"kv_cache_dtype": "int8", "kv_hadamard": True},
    "fp8 KV": {"kv_cache_dtype": "fp8"},
    "fp8 KV, rotated": {"kv_cache_dtype": "fp8", "kv_hadamard": True},
    "w8a8, int8 KV": {"quantization": "w8a8", "kv_cache_dtype": "int8"},
    "w8a8, int8 KV, rotated": {
        "quantization": "w8a8",
        "kv_cache_dtype": "int8",
        "kv_hadamard": True,
    },
}
BASE = "bfloat16"


def loaded(
    options: dict[str, Any],
    only: Callable[[str], bool] | None = None,
    *,
    packed: bool = True,
    model: str = "tiny-hy3",
) -> CausalLM:
    """The model as the engine builds it; only: the weights that are quantised, by name."""
    folder = resolve_model(model)
    spec = load_model_spec(folder)
    config = EngineConfig(**options)
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    formats, _ = choose_weight_formats(spec, config, dtype, spec.num_mtp_layers)
    if only is not None:
        kept = {m.name: formats.plain for m in matrices(spec, 1) if not only(m.name)}
        formats = formats.with_exceptions(kept)
    return load(folder, getattr(torch, dtype), formats, packed=packed)


def load(
    folder: Path, dtype: torch.dtype, formats: WeightFormats, *, packed: bool = True
) -> CausalLM:
    """packed: the device's own layout; else the rows layout, which the references read."""
    device = load_backend("cpu")
    spec = load_model_spec(folder)
    model = build_model(spec, Parameters(dtype, formats, "cpu", device if packed else None))
    load_weights(spec, model.weights, folder, backend=device)
    pack_routers(model, device, dtype)
    return model


def window_logits(
    model: CausalLM, window: np.ndarray, options: dict[str, Any] | None = None
) -> torch.Tensor:
    """[WINDOW, V] fp32; options: the engine's, of which those of KV count here."""
    options = options or {}
    kv_dtype = KV_DTYPES.get(options.get("kv_cache_dtype", "auto"))
    hadamard = options.get("kv_hadamard", False)
    loop = PagedLoop(model, 1, len(window), 64, kv_dtype, hadamard=hadamard)
    parts = np.split(window, np.cumsum(CHUNKS)[:-1]) if len(window) > CHUNKS[0] else [window]
    return model.compute_logits(torch.cat([loop.step([part]) for part in parts]))


@contextmanager
def reference_products() -> Iterator[None]:
    """Within, products with weights are computed by the references: the byte spec, simulated."""
    products: tuple[Op, ...] = (ops.linear, ops.moe_experts)
    kept = [op.bodies["cpu"] for op in products]
    try:
        for op in products:
            op.bodies["cpu"] = [Body("reference", "cpu", op.reference, None, False)]
        yield
    finally:
        for op, bodies in zip(products, kept, strict=True):
            op.bodies["cpu"] = bodies


def measure(
    makers: dict[str, Callable[[], CausalLM]], num_windows: int, *, simulate: bool
) -> dict[str, dict[str, float]]:
    """Perplexity, loss against BASE in percent and KL from it, for every model made.

    simulate: products are computed by the references, but for BASE.
    """
    models = {name: make() for name, make in makers.items()}
    nll: dict[str, list[float]] = {name: [] for name in models}
    kl: dict[str, list[float]] = {name: [] for name in models}
    for window in heldout_windows()[:num_windows]:
        teacher = window_logits(models[BASE], window)
        for name, model in models.items():
            with reference_products() if simulate and name != BASE else nullcontext():
                logits = teacher
                if name != BASE:
                    logits = window_logits(model, window, RUNS.get(name, {}))
            nll[name].append(window_nll(logits, window))
            kl[name].append(mean_kl(teacher.numpy(), logits.numpy()))
    base = perplexity(nll[BASE])
    results = {}
    for name in models:
        found = perplexity(nll[name])
        results[name] = {
            "perplexity": found,
            "loss_percent": 100 * (found / base - 1),
            "kl": float(np.mean(kl[name])),
        }
        print(f"{name:<30} {describe(results[name])}", file=sys.stderr, flush=True)
    return results


def describe(result: dict[str, float]) -> str:
    return (
        f"perplexity {result['perplexity']:.4f}  against {BASE} {result['loss_percent']:+.3f}%  "
        f"KL {result['kl']:.3e}"
    )


def parts_of(name: str) -> dict[str, Callable[[str], bool]]:
    """Ways to quantise a part of the model alone: by kind, then by layer."""
    spec = load_model_spec(resolve_model("tiny-hy3"))
    kinds = ("self_attn.qkv_proj", "self_attn.o_proj", "experts.gate_up_proj", "experts.down_proj",
             "mlp.gate_up_proj", "mlp.down_proj", "lm_head")  # fmt: skip
    parts: dict[str, Callable[[str], bool]] = {
        f"{name}, only {kind}": (lambda n, kind=kind: kind in n) for kind in kinds
    }
    for i in range(spec.num_hidden_layers):
        parts[f"{name}, only layer {i}"] = lambda n, i=i: f".layers.{i}." in n
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=len(heldout_windows()))
    parser.add_argument("--formats", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--simulate", action="store_true", help="also with the byte spec")
    parser.add_argument("--by-part", choices=RUNS, help="this format on one part at a time")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    load_backend("cpu").set_num_threads(args.threads)
    names = list(dict.fromkeys([BASE, *args.formats]))
    makers: dict[str, Callable[[], CausalLM]] = {n: (lambda n=n: loaded(RUNS[n])) for n in names}
    if args.by_part:
        makers = {BASE: makers[BASE], args.by_part: lambda: loaded(RUNS[args.by_part])}
        for name, only in parts_of(args.by_part).items():
            makers[name] = lambda only=only: loaded(RUNS[args.by_part], only)
    results = measure(makers, args.windows, simulate=False)
    report = {"windows": args.windows, "identity": load_backend("cpu").identity, "runs": results}
    if args.simulate:
        rows = {n: (lambda n=n: loaded(RUNS[n], packed=False)) for n in names if n != "float32"}
        report["simulated"] = measure(rows, args.windows, simulate=True)
    if args.json:
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
