"""KVPool: the memory of the paged KV cache on one device."""

import torch

from moestro.core.model_spec import ModelSpec
from moestro.ops.kv_pages import KVPages
from moestro.quant.kv import LARGEST_CODE

_FP32 = 4


class KVPool:
    """num_pages pages of page_size tokens for each of num_layers layers, keys and values apart.

    layers[i]: the KVPages of layer i, k and v [P, G, B, D] of `dtype`; int8 and float8_e4m3fn come
    with scales [P, G, B] fp32, which lie behind all codes. hadamard: keys are kept rotated. One
    allocation, never written here: the operating system gives memory page by page as keys arrive.
    num_layers counts MTP layers too when they keep KV; the default is the trunk's.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        num_layers: int | None = None,
        *,
        hadamard: bool = False,
    ) -> None:
        layers = spec.num_hidden_layers if num_layers is None else num_layers
        rows = (layers, 2, num_pages, spec.num_key_value_heads, page_size)
        num_rows = 2 * layers * num_pages * spec.num_key_value_heads * page_size
        element_bytes = num_rows * spec.head_dim * dtype.itemsize
        scales_at = -(-element_bytes // _FP32) * _FP32
        self.num_bytes = element_bytes
        if dtype in LARGEST_CODE:
            self.num_bytes = scales_at + num_rows * _FP32
        memory = torch.empty(self.num_bytes, dtype=torch.uint8)
        self.num_pages = num_pages
        self.page_size = page_size
        held = memory[:element_bytes].view(dtype).view(*rows, spec.head_dim)
        if dtype in LARGEST_CODE:
            scales = memory[scales_at:].view(torch.float32).view(rows)
            parts = zip(held.unbind(0), scales.unbind(0), strict=True)
            self.layers = tuple(KVPages(k, v, ks, vs, hadamard) for (k, v), (ks, vs) in parts)
        else:
            self.layers = tuple(KVPages(k, v, hadamard=hadamard) for k, v in held.unbind(0))
        self._storage = memory.untyped_storage()

    def close(self) -> None:
        """Give the memory back now, whoever still holds a view of it. Idempotent."""
        self.layers = ()
        self._storage.resize_(0)
