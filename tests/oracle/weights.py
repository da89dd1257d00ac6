"""Random weights by a rule of our own: a tensor depends on the seed and its name only.

numpy's raw PCG64 stream is the one part of numpy.random that never changes, so goldens stay valid
without storing a weight. Names and shapes are those of HF's state dict. All values but the expert
bias are representable in bf16, as in a real checkpoint: fp32 and bf16 models hold the same weights.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


def draw_tensor(name: str, shape: Sequence[int], seed: int) -> Array:
    """Uniform values of a scale that suits the tensor: signals keep their size through layers."""
    values = _uniform(name, math.prod(shape), seed).reshape(tuple(shape))
    if name.endswith("norm.weight"):
        return _to_bf16_grid(1.0 + 0.2 * values)
    if name.endswith("e_score_correction_bias"):
        return (0.3 * values).astype(np.float32)
    if name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")):
        return _to_bf16_grid(values * (3.0 / math.sqrt(shape[-1])))
    # One expert of many matters little in a trained model. Were it otherwise here, a single expert
    # chosen differently in bf16 would outweigh all else, and no comparison in bf16 would mean much.
    gain = 0.2 if name.endswith("experts.down_proj") else 1.5
    return _to_bf16_grid(values * (gain / math.sqrt(shape[-1])))


def draw_tokens(name: str, vocab_size: int, count: int, seed: int) -> npt.NDArray[np.int64]:
    """Random token ids, [count]."""
    raw = _stream(name, seed).random_raw(count)
    return (raw % np.uint64(vocab_size)).astype(np.int64)


def _uniform(name: str, count: int, seed: int) -> npt.NDArray[np.float64]:
    """Values in [-1, 1)."""
    raw = _stream(name, seed).random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0


def _stream(name: str, seed: int) -> np.random.PCG64:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    return np.random.PCG64(int.from_bytes(digest, "little"))


def _to_bf16_grid(values: npt.NDArray[np.float64]) -> Array:
    """Cut to the 8 significant bits of bf16."""
    bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)
