"""Matrix product and embedding lookup on the native library."""

import torch

from moestro import ops
from moestro.backends.cpu.arguments import DTYPE_CODES
from moestro.backends.cpu.library import native
from moestro.ops.registry import implements

_LIB = native()


def _fits(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None = None) -> bool:
    return (
        x.dtype in DTYPE_CODES
        and weight.dtype in DTYPE_CODES
        and (x.dtype == weight.dtype or x.dtype == torch.float32)
        and (out_dtype is None or out_dtype in DTYPE_CODES)
        and x.dim() == 2
        and weight.dim() == 2
        and x.shape[1] == weight.shape[1] > 0
    )


@implements(ops.linear, devices=("cpu",), when=_fits, invariant=True)
def linear(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    tokens, out_features = x.shape[0], weight.shape[0]
    out = torch.empty((tokens, out_features), dtype=out_dtype or x.dtype)
    status = _LIB.linear(
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        tokens,
        x.shape[1],
        out_features,
        DTYPE_CODES[x.dtype],
        DTYPE_CODES[weight.dtype],
        DTYPE_CODES[out.dtype],
    )
    if status:
        _LIB.fail(status)
    return out


def _is_table(input_ids: torch.Tensor, weight: torch.Tensor) -> bool:
    return input_ids.dtype == torch.int64 and input_ids.dim() == 1 and weight.dim() == 2


@implements(ops.embedding, devices=("cpu",), when=_is_table, invariant=True)
def embedding(input_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    input_ids, weight = input_ids.contiguous(), weight.contiguous()
    vocab, hidden = weight.shape
    out = weight.new_empty((input_ids.shape[0], hidden))
    status = _LIB.embedding(
        input_ids.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        input_ids.shape[0],
        vocab,
        hidden * weight.element_size(),
    )
    if status:
        _LIB.fail(status)
    return out
