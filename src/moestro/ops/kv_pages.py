"""The paged KV cache of one layer and the op that writes it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from moestro.ops.registry import op
from moestro.ops.testing import FLOAT_DTYPES, Arguments, Case, normal
from moestro.quant.kv import LARGEST_CODE, dequantize_rows, quantize_rows

NO_SLOT = -1
"""Slot of a token whose keys and values are not stored."""


@dataclass(frozen=True, slots=True)
class KVPages:
    """One layer's pages: k and v are [P, G, B, D] (page, kv head, slot in page, head dim).

    k and v: a float type, or int8 or float8_e4m3fn codes with k_scales and v_scales, [P, G, B]
    fp32, one a row (quant.kv is the byte spec). hadamard: keys are rotated before they are kept,
    and so must be the queries that meet them. Raises ValueError for parts that do not belong
    together.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    hadamard: bool = False

    def __post_init__(self) -> None:
        k, v = self.k, self.v
        if k.dim() != 4 or k.shape != v.shape or k.dtype != v.dtype:
            raise ValueError(
                "keys and values are pages [P, G, B, D] of one shape and type, not "
                f"{list(k.shape)} {k.dtype} and {list(v.shape)} {v.dtype}."
            )
        has_codes, rows = k.dtype in LARGEST_CODE, k.shape[:3]
        for name, scales in (("k_scales", self.k_scales), ("v_scales", self.v_scales)):
            if has_codes != (scales is not None):
                wants = "codes and need" if has_codes else "numbers and take no"
                raise ValueError(f"pages of {k.dtype} hold {wants} {name}.")
            if scales is not None and (scales.shape != rows or scales.dtype != torch.float32):
                raise ValueError(
                    f"{name} are one torch.float32 a row of the pages, {list(rows)}, not "
                    f"{list(scales.shape)} {scales.dtype}."
                )

    @property
    def page_size(self) -> int:
        return self.k.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3]

    def values(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some pages [M] as fp32 [M, G, B, D]."""
        k_scales = None if self.k_scales is None else self.k_scales[pages]
        v_scales = None if self.v_scales is None else self.v_scales[pages]
        return dequantize_rows(self.k[pages], k_scales), dequantize_rows(self.v[pages], v_scales)


QUANTIZED_DTYPES = tuple(LARGEST_CODE)


def draw_pages(
    shape: tuple[int, int, int, int], dtype: torch.dtype, generator: torch.Generator
) -> KVPages:
    """Pages [P, G, B, D] full of normal numbers, for cases."""
    drawn = [normal(generator, *shape, dtype=torch.float32) for _ in "kv"]
    if dtype not in LARGEST_CODE:
        return KVPages(drawn[0].to(dtype), drawn[1].to(dtype))
    (k, k_scales), (v, v_scales) = (quantize_rows(t, dtype) for t in drawn)
    return KVPages(k, v, k_scales, v_scales)


def _cases() -> Iterator[Case]:
    sizes = ((0, 2, 8, 16), (1, 1, 8, 1), (5, 2, 24, 7), (40, 4, 16, 16), (90, 1, 128, 64))
    for dtype in FLOAT_DTYPES:
        for size in sizes:
            yield Case(f"T, G, D, B = {list(size)}", dtype, partial(_draw, size, dtype, dtype))
        for page_dtype in QUANTIZED_DTYPES:
            for size in ((1, 1, 8, 1), (5, 2, 24, 16), *sizes[3:]):
                make = partial(_draw, size, dtype, page_dtype)
                yield Case(f"{page_dtype}, T, G, D, B = {list(size)}", dtype, make)
    for page_dtype in (torch.bfloat16, torch.float16):
        make = partial(_draw, (9, 2, 24, 7), torch.float32, page_dtype)
        yield Case(f"fp32 into {page_dtype} pages", torch.float32, make)
    for page_dtype in QUANTIZED_DTYPES:
        make = partial(_draw, (40, 4, 16, 16), torch.float32, page_dtype, awkward=True)
        yield Case(f"zeros, inf and tiny into {page_dtype} pages", torch.float32, make)


def _draw(
    size: tuple[int, int, int, int],
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    generator: torch.Generator,
    *,
    awkward: bool = False,
) -> Arguments:
    """Slots in no order, every fifth token skipped; k and v are views of one tensor, as in use."""
    tokens, kv_heads, dim, page_size = size
    pages = tokens // page_size + 3
    k, v = normal(generator, tokens, 2 * kv_heads, dim, dtype=dtype).chunk(2, dim=1)
    if awkward:
        k[1], v[2], k[3, 0, 2], v[4, 0, 3] = 0.0, 0.0, torch.inf, torch.nan
        k[6], k[7], k[8] = k[6] * 1e-37, k[7] * 1e-33, v[8] * 1e30
    slot_mapping = torch.randperm(pages * page_size, generator=generator)[:tokens]
    slot_mapping[::5] = -1
    held = draw_pages((pages, kv_heads, page_size, dim), page_dtype, generator)
    return {"k": k, "v": v, "pages": held, "slot_mapping": slot_mapping}


@op(cases=_cases, mutates=("pages",))
def store_kv(k: torch.Tensor, v: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor) -> None:
    """Write each token's k and v into its slot, quantised where the pages are.

    k, v: [T, G, D]; slot_mapping: [T] int64, slot = page * B + offset, each at most once;
    -1 skips the token. Codes and scales are those of quant.kv.quantize_rows, exactly; keys are
    taken as they come (pages.hadamard is the caller's business). Mutates pages.
    Source: Kwon et al. 2023, https://arxiv.org/abs/2309.06180.
    """
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    page, offset = slots // pages.page_size, slots % pages.page_size
    for x, held, scales in ((k, pages.k, pages.k_scales), (v, pages.v, pages.v_scales)):
        if scales is None:
            held[page, :, offset] = x[kept].to(held.dtype)
            continue
        codes, row_scales = quantize_rows(x[kept], held.dtype)
        # torch has no indexed assignment for float8
        held.view(torch.uint8)[page, :, offset] = codes.view(torch.uint8)
        scales[page, :, offset] = row_scales
