"""Per-head RMSNorm of q and k followed by rotary embedding."""

from collections.abc import Iterator
from functools import partial

import torch

from moestro.ops.norm import rms_norm
from moestro.ops.registry import op
from moestro.ops.testing import FLOAT_DTYPES, Arguments, Case, norm_weight, normal


def _cases() -> Iterator[Case]:
    sizes = (
        (0, 4, 2, 16),
        (1, 1, 1, 2),
        (3, 4, 1, 8),
        (5, 16, 1, 64),
        (7, 6, 2, 24),
        (2, 3, 3, 40),
        (4, 8, 8, 128),
    )
    for dtype in FLOAT_DTYPES:
        for size in sizes:
            yield Case(f"T, H, G, D = {list(size)}", dtype, partial(_draw, size, dtype))


def _draw(
    size: tuple[int, int, int, int], dtype: torch.dtype, generator: torch.Generator
) -> Arguments:
    """Far positions, and the factor 1.14 that YaRN puts on cos and sin."""
    tokens, heads, kv_heads, dim = size
    angles = torch.rand((tokens, dim // 2), generator=generator) * 1e4
    return {
        "qkv": normal(generator, tokens, (heads + 2 * kv_heads) * dim, dtype=dtype, scale=3.0),
        "q_weight": norm_weight(generator, dim, dtype),
        "k_weight": norm_weight(generator, dim, dtype),
        "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=-1) * 1.14,
        "eps": 1e-6,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
    }


@op(cases=_cases)
def qk_norm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split qkv into heads, normalise each q and k head, rotate them; v passes untouched.

    qkv: [T, (H + 2 G) D], heads in the order q, k, v; q_weight, k_weight: [D] norm weights shared
    by the heads; cos_sin: [T, D] fp32, cos of the D / 2 angles of each token's position, then sin.
    Returns q [T, H, D], k [T, G, D], v [T, G, D] in qkv's dtype. NeoX pairs (i, i + D / 2).
    Arithmetic in fp32, rounded once. Source: Su et al. 2021, https://arxiv.org/abs/2104.09864;
    norm before rotation as in HF's hy_v3 and qwen3_moe.
    """
    tokens = qkv.shape[0]
    head_dim = q_weight.shape[0]
    heads = qkv.view(tokens, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    q = _rotate(rms_norm.reference(q.float(), q_weight, eps), cos_sin)
    k = _rotate(rms_norm.reference(k.float(), k_weight, eps), cos_sin)
    return q.to(qkv.dtype), k.to(qkv.dtype), v.contiguous()


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D / 2]
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
