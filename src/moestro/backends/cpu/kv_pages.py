"""Writing keys and values into pages on the native library."""

import torch

from moestro import ops
from moestro.backends.cpu.arguments import DTYPE_CODES, StoreKvArgs
from moestro.backends.cpu.launch import Kernel, launch
from moestro.ops.registry import implements

_STORE_KV = Kernel("store_kv")


def _fits(k: torch.Tensor, v: torch.Tensor, pages: ops.KVPages, slot_mapping: torch.Tensor) -> bool:
    return (
        k.dtype in DTYPE_CODES
        and k.dtype == v.dtype
        and k.shape == v.shape
        and k.dim() == 3
        and is_pool(pages)
        and (pages.k.shape[1], pages.k.shape[3]) == k.shape[1:]
        and slot_mapping.dtype == torch.int64
        and slot_mapping.shape == k.shape[:1]
    )


def is_pool(pages: ops.KVPages) -> bool:
    """Whether the pages have a layout the kernels address: any strides, heads' rows contiguous."""
    return (
        pages.k.dtype in DTYPE_CODES
        and pages.k.dtype == pages.v.dtype
        and pages.k.shape == pages.v.shape
        and pages.k.dim() == 4
        and pages.k.stride(3) == 1
        and pages.v.stride(3) == 1
    )


@implements(ops.store_kv, devices=("cpu",), when=_fits, invariant=True)
def store_kv(
    k: torch.Tensor, v: torch.Tensor, pages: ops.KVPages, slot_mapping: torch.Tensor
) -> None:
    k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (k, v))
    slot_mapping = slot_mapping.contiguous()
    tokens, kv_heads, dim = k.shape
    arguments = StoreKvArgs(
        k.data_ptr(),
        v.data_ptr(),
        pages.k.data_ptr(),
        pages.v.data_ptr(),
        slot_mapping.data_ptr(),
        *k.stride()[:2],
        *v.stride()[:2],
        *pages.k.stride()[:3],
        *pages.v.stride()[:3],
        tokens,
        kv_heads,
        dim,
        pages.page_size,
        pages.k.shape[0],
        DTYPE_CODES[k.dtype],
        DTYPE_CODES[pages.k.dtype],
    )
    launch(_STORE_KV, arguments, k, v, pages.k, pages.v, slot_mapping)
