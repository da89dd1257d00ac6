"""Writing keys and values into pages on the native library."""

import torch

from moestro import ops
from moestro.backends.cpu.arguments import DTYPE_CODES, KvPagesArgs, StoreKvArgs
from moestro.backends.cpu.launch import Kernel, launch
from moestro.ops.registry import implements

_STORE_KV = Kernel("store_kv")
_KV_CODES: dict[torch.dtype, int] = {torch.int8: 3, torch.float8_e4m3fn: 4}


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
    for scales in (pages.k_scales, pages.v_scales):
        if scales is not None and scales.stride(2) != 1:
            return False
    return (
        (pages.k.dtype in DTYPE_CODES or pages.k.dtype in _KV_CODES)
        and pages.k.stride(3) == 1
        and pages.v.stride(3) == 1
    )


def pages_args(pages: ops.KVPages) -> KvPagesArgs:
    """The pages as the kernels take them."""
    k, v, k_scales, v_scales = pages.k, pages.v, pages.k_scales, pages.v_scales
    scales: list[int | None]
    if k_scales is None or v_scales is None:
        code, scales, strides = DTYPE_CODES[k.dtype], [None, None], [0, 0, 0, 0]
    else:
        code = _KV_CODES[k.dtype]
        scales = [k_scales.data_ptr(), v_scales.data_ptr()]
        strides = [*k_scales.stride()[:2], *v_scales.stride()[:2]]
    return KvPagesArgs(
        k.data_ptr(),
        v.data_ptr(),
        *scales,
        *k.stride()[:3],
        *v.stride()[:3],
        *strides,
        k.shape[0],
        k.shape[2],
        code,
    )


def pages_tensors(pages: ops.KVPages) -> tuple[torch.Tensor, ...]:
    """The tensors whose memory pages_args points to."""
    if pages.k_scales is None or pages.v_scales is None:
        return pages.k, pages.v
    return pages.k, pages.v, pages.k_scales, pages.v_scales


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
        slot_mapping.data_ptr(),
        pages_args(pages),
        *k.stride()[:2],
        *v.stride()[:2],
        tokens,
        kv_heads,
        dim,
        DTYPE_CODES[k.dtype],
    )
    launch(_STORE_KV, arguments, k, v, slot_mapping, *pages_tensors(pages))
