"""The paged KV cache of one layer and the op that writes it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moestro.ops.registry import op
from moestro.ops.testing import Case


@dataclass(frozen=True, slots=True)
class KVPages:
    """One layer's pages: k and v are [P, G, B, D] (page, kv head, slot in page, head dim)."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.k.shape[2]


def _cases() -> Iterator[Case]:
    yield from ()


@op(cases=_cases, mutates=("pages",))
def store_kv(
    k: torch.Tensor, v: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor
) -> None:
    """Write each token's k and v into its slot.

    k, v: [T, G, D]; slot_mapping: [T] int64, slot = page * B + offset, each at most once;
    -1 skips the token. Mutates pages.
    """
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    page, offset = slots // pages.page_size, slots % pages.page_size
    pages.k[page, :, offset] = k[kept].to(pages.k.dtype)
    pages.v[page, :, offset] = v[kept].to(pages.v.dtype)
