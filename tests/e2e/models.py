"""The models the end-to-end tests run: the bundled one and random ones of both architectures."""

import atexit
import functools
import tempfile
from pathlib import Path

from bench.make_model import make_model, parse_args

NAMES = ("tiny-hy3", "hy_v3", "qwen3_moe")
QUANTIZED = (
    "tiny-hy3:w4a8", "hy_v3:w8a8", "hy_v3:w4a8", "hy_v3:fp8", "qwen3_moe:w8a8", "qwen3_moe:w4a8",
)  # fmt: skip
"""A model and what its weights are quantised to at load."""

_SHAPES = {
    "hy_v3": "--num-heads 6 --num-kv-heads 2 --head-dim 16 --num-experts 12 --top-k 3 "
    "--num-shared-experts 2",
    "qwen3_moe": "--num-heads 4 --num-kv-heads 4 --head-dim 32 --num-experts 8 --top-k 8 "
    "--tie-word-embeddings",
}


def model_options(name: str) -> dict[str, str]:
    """Engine options for a name of NAMES or QUANTIZED."""
    model, _, quantization = name.partition(":")
    return {"model": model_path(model), "quantization": quantization or "none"}


@functools.cache
def model_path(name: str) -> str:
    """What to give as `model`; random models are written once a process."""
    if name not in _SHAPES:
        return name
    scratch = tempfile.TemporaryDirectory(prefix="moestro-e2e-")
    atexit.register(scratch.cleanup)
    common = (
        f"--model-type {name} --hidden-size 64 --num-layers 3 --moe-intermediate-size 32 "
        "--intermediate-size 96 --vocab-size 512 --max-position-embeddings 1024 --std 0.2"
    )
    folder = Path(scratch.name) / "model"
    make_model(parse_args([str(folder), *common.split(), *_SHAPES[name].split()]))
    return str(folder)
