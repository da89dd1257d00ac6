"""PageLayout: how the bytes of one page lie outside the device: the same for every engine."""

from dataclasses import dataclass

import torch

from moestro.quant.kv import LARGEST_CODE

LAYOUT_VERSION = 1
"""Of this layout; it is part of the namespace digest of every store."""
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class PageLayout:
    """[layer][kv head][k codes, k scales, v codes, v scales], no padding, little endian.

    Codes are [B, D] of `dtype`, scales [B] fp32 where the type has them (quant.kv). A layer's and a
    head's bytes are contiguous, so that a rank that holds some heads reads its own in one piece.
    """

    num_layers: int
    num_kv_heads: int
    page_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def code_bytes(self) -> int:
        """Of the keys, or the values, of one head."""
        return self.page_size * self.head_dim * self.dtype.itemsize

    @property
    def scale_bytes(self) -> int:
        """Beside code_bytes; 0 for float types."""
        return self.page_size * _SCALE_BYTES if self.dtype in LARGEST_CODE else 0

    @property
    def head_bytes(self) -> int:
        return 2 * (self.code_bytes + self.scale_bytes)

    @property
    def layer_bytes(self) -> int:
        return self.num_kv_heads * self.head_bytes

    @property
    def page_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @property
    def parts(self) -> tuple[slice, ...]:
        """Where k codes, v codes, then k scales and v scales lie within a head's bytes."""
        codes, half = self.code_bytes, self.head_bytes // 2
        found = [slice(0, codes), slice(half, half + codes)]
        if self.scale_bytes:
            found += [slice(codes, half), slice(half + codes, 2 * half)]
        return tuple(found)
