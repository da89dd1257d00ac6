"""Per-head RMSNorm of q and k, rotary embedding, and the whole way of k and v into their pages."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from moestro.ops.kv_pages import QUANTIZED_DTYPES, KVPages, draw_pages, store_kv
from moestro.ops.norm import rms_norm
from moestro.ops.registry import op
from moestro.ops.testing import FLOAT_DTYPES, Arguments, Case, norm_weight, normal
from moestro.quant.kv import hadamard


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary embedding of a batch: where to look, and what.

    table: [L, R] fp32, row p holds cos of position p's R / 2 angles, then sin. R may be less than
    the head dimension; what it leaves is not rotated. positions: [T] int64.
    """

    table: torch.Tensor
    positions: torch.Tensor


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
        for rotary_dim in (2, 18, 32):
            make = partial(_draw, (6, 4, 2, 40), dtype, rotary_dim=rotary_dim)
            yield Case(f"{rotary_dim} of 40 rotated", dtype, make)


def _draw(
    size: tuple[int, int, int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    rotary_dim: int | None = None,
) -> Arguments:
    tokens, heads, kv_heads, dim = size
    return {
        "qkv": normal(generator, tokens, (heads + 2 * kv_heads) * dim, dtype=dtype, scale=3.0),
        "q_weight": norm_weight(generator, dim, dtype),
        "k_weight": norm_weight(generator, dim, dtype),
        "cos_sin": _draw_rows(tokens, rotary_dim or dim, generator),
        "eps": 1e-6,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
    }


def _draw_rows(count: int, rotary_dim: int, generator: torch.Generator) -> torch.Tensor:
    """Far positions, and the factor 1.14 that YaRN puts on cos and sin."""
    angles = torch.rand((count, rotary_dim // 2), generator=generator) * 1e4
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * 1.14


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
    by the heads; cos_sin: [T, R] fp32, cos of the R / 2 angles of each token's position, then sin,
    R even and at most D: the first R elements of a head are rotated, in NeoX pairs (i, i + R / 2),
    the rest is normalised only. Returns q [T, H, D], k [T, G, D], v [T, G, D] in qkv's dtype.
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
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R / 2]
    rotated, rest = x.split((cos_sin.shape[1], x.shape[-1] - cos_sin.shape[1]), dim=-1)
    low, high = rotated.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


def _store_cases() -> Iterator[Case]:
    sizes = ((0, 4, 2, 16), (1, 1, 1, 2), (5, 16, 1, 64), (7, 6, 2, 24), (4, 8, 8, 128))
    for dtype in FLOAT_DTYPES:
        for size in sizes:
            make = partial(_draw_store, size, dtype, dtype)
            yield Case(f"T, H, G, D = {list(size)}", dtype, make)
        make = partial(_draw_store, (5, 6, 3, 40), dtype, dtype, rotary_dim=18)
        yield Case("18 of 40 rotated", dtype, make)
        make = partial(_draw_store, (5, 4, 2, 64), dtype, dtype, rotates=True)
        yield Case("Hadamard", dtype, make)
    for page_dtype in QUANTIZED_DTYPES:
        # in fp32 only: elsewhere a sum that rounds the other way may be the next code
        for rotates in (False, True):
            make = partial(_draw_store, (9, 8, 2, 64), torch.float32, page_dtype, rotates=rotates)
            name = f"{page_dtype} pages{', Hadamard' * rotates}"
            yield Case(name, torch.float32, make)


def _draw_store(
    size: tuple[int, int, int, int],
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    generator: torch.Generator,
    *,
    rotary_dim: int | None = None,
    rotates: bool = False,
) -> Arguments:
    """Positions in no order, pages of seven tokens, every fifth token not stored."""
    tokens, _, kv_heads, dim = size
    drawn = _draw(size, dtype, generator)
    table = _draw_rows(19, rotary_dim or dim, generator)
    slots = torch.randperm(21, generator=generator)[:tokens]
    slots[::5] = -1
    pages = draw_pages((3, kv_heads, 7, dim), page_dtype, generator)
    return {
        "qkv": drawn["qkv"],
        "q_weight": drawn["q_weight"],
        "k_weight": drawn["k_weight"],
        "rotary": Rotary(table, torch.randint(len(table), (tokens,), generator=generator)),
        "eps": 1e-6,
        "pages": replace(pages, hadamard=rotates),
        "slot_mapping": slots,
    }


@op(cases=_store_cases, mutates=("pages",))
def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rotary: Rotary,
    eps: float,
    pages: KVPages,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Norm and rotation of q and k, then k and v into their pages: all between two products.

    The composition of qk_norm_rope (with the rows of rotary.table at rotary.positions), of
    quant.kv.hadamard over q and k where pages.hadamard says so, and of store_kv; what one hands to
    the next is rounded to qkv's dtype, so a body that does all at once gives the same bits as one
    that does a part at a time. Shapes as there; the number of query heads is what qkv has beside
    the pages' kv heads. Returns q [T, H, D] in qkv's dtype; mutates pages. Sources: theirs.
    """
    kv_heads, dim = pages.num_kv_heads, pages.head_dim
    cos_sin = rotary.table[rotary.positions]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q: torch.Tensor
    q, k, v = qk_norm_rope.reference(qkv, q_weight, k_weight, cos_sin, eps, heads, kv_heads)
    if pages.hadamard:
        q, k = hadamard(q), hadamard(k)
    store_kv.reference(k, v, pages, slot_mapping)
    return q
