"""Head norms and rotary embedding on the native library."""

import torch

from moestro import ops
from moestro.backends.cpu.arguments import DTYPE_CODES, RopeArgs
from moestro.backends.cpu.buffers import new_empty
from moestro.backends.cpu.launch import Kernel, launch
from moestro.ops.registry import implements

_QK_NORM_ROPE = Kernel("qk_norm_rope")


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
        and dim % 2 == 0
        and k_weight.shape[0] == dim
        and qkv.shape[1] == (num_heads + 2 * num_kv_heads) * dim
        and cos_sin.shape == (qkv.shape[0], dim)
    )


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
        eps,
        DTYPE_CODES[qkv.dtype],
        DTYPE_CODES[q_weight.dtype],
    )
    launch(_QK_NORM_ROPE, arguments, qkv, q_weight, k_weight, cos_sin, q, k, v)
    return q, k, v
