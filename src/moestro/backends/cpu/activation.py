"""SwiGLU's element-wise half on the native library."""

import torch

from moestro import ops
from moestro.backends.cpu.arguments import DTYPE_CODES
from moestro.backends.cpu.library import native
from moestro.ops.registry import implements

_LIB = native()


def _fits(x: torch.Tensor) -> bool:
    return x.dtype in DTYPE_CODES and x.dim() > 0 and x.shape[-1] % 2 == 0


@implements(ops.silu_and_mul, devices=("cpu",), when=_fits, invariant=True)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    size = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], size))
    rows = out.numel() // size if size else 0
    status = _LIB.silu_and_mul(x.data_ptr(), out.data_ptr(), rows, size, DTYPE_CODES[x.dtype])
    if status:
        _LIB.fail(status)
    return out
