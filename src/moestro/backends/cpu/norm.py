"""RMSNorm on the native library."""

import torch

from moestro import ops
from moestro.backends.cpu.arguments import DTYPE_CODES
from moestro.backends.cpu.library import native
from moestro.ops.registry import implements

_LIB = native()


def _fits(x: torch.Tensor, weight: torch.Tensor, eps: float) -> bool:
    return x.dtype in DTYPE_CODES and weight.dtype in DTYPE_CODES and weight.shape == x.shape[-1:]


def _fits_pair(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> bool:
    return x.shape == residual.shape and x.dtype == residual.dtype and _fits(x, weight, eps)


@implements(ops.rms_norm, devices=("cpu",), when=_fits, invariant=True)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    status = _LIB.rms_norm(
        x.data_ptr(),
        None,
        weight.data_ptr(),
        out.data_ptr(),
        None,
        x.numel() // size if size else 0,
        size,
        eps,
        DTYPE_CODES[x.dtype],
        DTYPE_CODES[weight.dtype],
    )
    if status:
        _LIB.fail(status)
    return out


@implements(ops.add_rms_norm, devices=("cpu",), when=_fits_pair, invariant=True)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    out, summed = torch.empty_like(x), torch.empty_like(x)
    size = x.shape[-1]
    status = _LIB.rms_norm(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        summed.data_ptr(),
        x.numel() // size if size else 0,
        size,
        eps,
        DTYPE_CODES[x.dtype],
        DTYPE_CODES[weight.dtype],
    )
    if status:
        _LIB.fail(status)
    return out, summed
