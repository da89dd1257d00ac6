"""SwiGLU's element-wise half on the native library."""

import torch

from moestro import ops
from moestro.backends.cpu.arguments import DTYPE_CODES, ActivationArgs
from moestro.backends.cpu.buffers import new_empty
from moestro.backends.cpu.launch import Kernel, launch
from moestro.ops.registry import implements

_SILU_AND_MUL = Kernel("silu_and_mul")


def _fits(x: torch.Tensor) -> bool:
    return x.dtype in DTYPE_CODES and x.dim() > 0 and x.shape[-1] % 2 == 0


@implements(ops.silu_and_mul, devices=("cpu",), when=_fits, invariant=True)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    size = x.shape[-1] // 2
    out = new_empty((*x.shape[:-1], size), x.dtype)
    rows = out.numel() // size if size else 0
    arguments = ActivationArgs(x.data_ptr(), out.data_ptr(), rows, size, DTYPE_CODES[x.dtype])
    launch(_SILU_AND_MUL, arguments, x, out)
    return out
