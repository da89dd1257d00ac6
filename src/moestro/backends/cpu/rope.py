"""Head norms, rotary embedding and the way into pages on the native library."""

import torch

from moestro import ops
from moestro.backends.cpu.arguments import DTYPE_CODES, RopeArgs, RopeStoreArgs
from moestro.backends.cpu.buffers import new_empty
from moestro.backends.cpu.kv_pages import is_pool, pages_args, pages_tensors
from moestro.backends.cpu.launch import Kernel, launch
from moestro.ops.registry import implements

_QK_NORM_ROPE = Kernel("qk_norm_rope")
_QK_NORM_ROPE_STORE = Kernel("qk_norm_rope_store")
_MAX_HEAD_DIM = 1024


def _fits(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> bool:
    dim = q_weight.shape[0]
    return (
        qkv.dtype in DTYPE_CODES
        and q_weight.dtype in DTYPE_CODES
        and q_weight.dtype == k_weight.dtype
        and cos_sin.dtype == torch.float32
        and k_weight.shape[0] == dim
        and qkv.shape[1] == (num_heads + 2 * num_kv_heads) * dim
        and cos_sin.shape[0] == qkv.shape[0]
        and _rotates(cos_sin.shape[1], dim)
    )


def _rotates(rotary_dim: int, dim: int) -> bool:
    return rotary_dim % 2 == 0 and 2 <= rotary_dim <= dim


@implements(ops.qk_norm_rope, devices=("cpu",), when=_fits, invariant=True)
def qk_norm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    qkv, cos_sin = qkv.contiguous(), cos_sin.contiguous()
    q_weight, k_weight = q_weight.contiguous(), k_weight.contiguous()
    tokens, dim = qkv.shape[0], q_weight.shape[0]
    q = new_empty((tokens, num_heads, dim), qkv.dtype)
    k = new_empty((tokens, num_kv_heads, dim), qkv.dtype)
    v = new_empty((tokens, num_kv_heads, dim), qkv.dtype)
    arguments = RopeArgs(
        qkv.data_ptr(),
        q_weight.data_ptr(),
        k_weight.data_ptr(),
        cos_sin.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        tokens,
        num_heads,
        num_kv_heads,
        dim,
        cos_sin.shape[1],
        eps,
        DTYPE_CODES[qkv.dtype],
        DTYPE_CODES[q_weight.dtype],
    )
    launch(_QK_NORM_ROPE, arguments, qkv, q_weight, k_weight, cos_sin, q, k, v)
    return q, k, v


def _fits_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rotary: ops.Rotary,
    eps: float,
    pages: ops.KVPages,
    slot_mapping: torch.Tensor,
) -> bool:
    table, positions = rotary.table, rotary.positions
    tokens, dim = qkv.shape[0], q_weight.shape[0]
    return (
        qkv.dtype in DTYPE_CODES
        and q_weight.dtype in DTYPE_CODES
        and q_weight.dtype == k_weight.dtype
        and q_weight.shape == k_weight.shape
        and is_pool(pages)
        and pages.k.shape[3] == dim <= _MAX_HEAD_DIM
        and qkv.shape[1] % dim == 0
        and qkv.shape[1] > 2 * pages.k.shape[1] * dim
        and (not pages.hadamard or dim & (dim - 1) == 0)
        and table.dtype == torch.float32
        and table.is_contiguous()
        and _rotates(table.shape[1], dim)
        and positions.dtype == slot_mapping.dtype == torch.int64
        and positions.shape == slot_mapping.shape == (tokens,)
    )


@implements(ops.qk_norm_rope_store, devices=("cpu",), when=_fits_store, invariant=True)
def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rotary: ops.Rotary,
    eps: float,
    pages: ops.KVPages,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    qkv, q_weight, k_weight = qkv.contiguous(), q_weight.contiguous(), k_weight.contiguous()
    table, positions = rotary.table, rotary.positions.contiguous()
    slot_mapping = slot_mapping.contiguous()
    tokens, dim, kv_heads = qkv.shape[0], q_weight.shape[0], pages.k.shape[1]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q = new_empty((tokens, heads, dim), qkv.dtype)
    arguments = RopeStoreArgs(
        qkv.data_ptr(),
        q_weight.data_ptr(),
        k_weight.data_ptr(),
        table.data_ptr(),
        positions.data_ptr(),
        slot_mapping.data_ptr(),
        q.data_ptr(),
        pages_args(pages),
        tokens,
        heads,
        kv_heads,
        dim,
        table.shape[1],
        table.shape[0],
        eps,
        DTYPE_CODES[qkv.dtype],
        DTYPE_CODES[q_weight.dtype],
        pages.hadamard,
    )
    held = (qkv, q_weight, k_weight, table, positions, slot_mapping, q, *pages_tensors(pages))
    launch(_QK_NORM_ROPE_STORE, arguments, *held)
    return q
