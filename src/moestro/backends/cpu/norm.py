"""RMSNorm on the native library."""

import torch

from moestro import ops
from moestro.backends.cpu.arguments import DTYPE_CODES, NormArgs
from moestro.backends.cpu.buffers import new_empty
from moestro.backends.cpu.launch import Kernel, launch
from moestro.ops.registry import implements

_RMS_NORM = Kernel("rms_norm")


def _fits(x: torch.Tensor, weight: torch.Tensor, eps: float) -> bool:
    return x.dtype in DTYPE_CODES and weight.dtype in DTYPE_CODES and weight.shape == x.shape[-1:]


def _fits_pair(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> bool:
    return x.shape == residual.shape and x.dtype == residual.dtype and _fits(x, weight, eps)


@implements(ops.rms_norm, devices=("cpu",), when=_fits, invariant=True)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    out = new_empty(tuple(x.shape), x.dtype)
    size = x.shape[-1]
    arguments = NormArgs(
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
    launch(_RMS_NORM, arguments, x, weight, out)
    return out


@implements(ops.add_rms_norm, devices=("cpu",), when=_fits_pair, invariant=True)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    shape = tuple(x.shape)
    out, summed = new_empty(shape, x.dtype), new_empty(shape, x.dtype)
    size = x.shape[-1]
    arguments = NormArgs(
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
    launch(_RMS_NORM, arguments, x, residual, weight, out, summed)
    return out, summed
