"""The paged KV cache of one layer and the op that writes it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from moestro.ops.registry import op
from moestro.ops.testing import FLOAT_DTYPES, Arguments, Case, normal


@dataclass(frozen=True, slots=True)
class KVPages:
    """One layer's pages: k and v are [P, G, B, D] (page, kv head, slot in page, head dim)."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.k.shape[2]


def _cases() -> Iterator[Case]:
    sizes = ((0, 2, 8, 16), (1, 1, 8, 1), (5, 2, 24, 7), (40, 4, 16, 16), (90, 1, 128, 64))
    for dtype in FLOAT_DTYPES:
        for size in sizes:
            yield Case(f"T, G, D, B = {list(size)}", dtype, partial(_draw, size, dtype, dtype))
    for page_dtype in (torch.bfloat16, torch.float16):
        make = partial(_draw, (9, 2, 24, 7), torch.float32, page_dtype)
        yield Case(f"fp32 into {page_dtype} pages", torch.float32, make)


def _draw(
    size: tuple[int, int, int, int],
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    generator: torch.Generator,
) -> Arguments:
    """Slots in no order, every fifth token skipped; k and v are views of one tensor, as in use."""
    tokens, kv_heads, dim, page_size = size
    pages = tokens // page_size + 3
    k, v = normal(generator, tokens, 2 * kv_heads, dim, dtype=dtype).chunk(2, dim=1)
    slot_mapping = torch.randperm(pages * page_size, generator=generator)[:tokens]
    slot_mapping[::5] = -1
    shape = (pages, kv_heads, page_size, dim)
    held = KVPages(*(normal(generator, *shape, dtype=page_dtype) for _ in "kv"))
    return {"k": k, "v": v, "pages": held, "slot_mapping": slot_mapping}


@op(cases=_cases, mutates=("pages",))
def store_kv(k: torch.Tensor, v: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor) -> None:
    """Write each token's k and v into its slot.

    k, v: [T, G, D]; slot_mapping: [T] int64, slot = page * B + offset, each at most once;
    -1 skips the token. Mutates pages. Source: Kwon et al. 2023, https://arxiv.org/abs/2309.06180.
    """
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    page, offset = slots // pages.page_size, slots % pages.page_size
    pages.k[page, :, offset] = k[kept].to(pages.k.dtype)
    pages.v[page, :, offset] = v[kept].to(pages.v.dtype)
