"""RMSNorm and an MTP layer's input on the native library."""

import torch

from moestro import ops
from moestro.backends.cpu.arguments import DTYPE_CODES, MtpInputArgs, NormArgs
from moestro.backends.cpu.buffers import new_empty
from moestro.backends.cpu.launch import Kernel, launch
from moestro.ops.registry import implements

_RMS_NORM, _MTP_INPUT = Kernel("rms_norm"), Kernel("mtp_input")


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


def _fits_mtp(
    embeddings: torch.Tensor,
    hidden_states: torch.Tensor,
    positions: torch.Tensor,
    embedding_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    eps: float,
) -> bool:
    return (
        embeddings.dim() == 2
        and positions.dtype == torch.int64
        and positions.shape == embeddings.shape[:1]
        and hidden_weight.shape == embedding_weight.shape
        and hidden_weight.dtype == embedding_weight.dtype
        and _fits_pair(embeddings, hidden_states, embedding_weight, eps)
    )


@implements(ops.mtp_input, devices=("cpu",), when=_fits_mtp, invariant=True)
def mtp_input(
    embeddings: torch.Tensor,
    hidden_states: torch.Tensor,
    positions: torch.Tensor,
    embedding_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    given = (embeddings, hidden_states, positions, embedding_weight, hidden_weight)
    read = tuple(t.contiguous() for t in given)
    rows, size = embeddings.shape
    out = new_empty((rows, 2 * size), embeddings.dtype)
    arguments = MtpInputArgs(
        *(t.data_ptr() for t in (*read, out)),
        rows,
        size,
        eps,
        DTYPE_CODES[embeddings.dtype],
        DTYPE_CODES[embedding_weight.dtype],
    )
    launch(_MTP_INPUT, arguments, *read, out)
    return out
