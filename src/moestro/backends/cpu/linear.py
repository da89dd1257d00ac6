"""Matrix product and embedding lookup on the native library."""

import torch

from moestro import ops
from moestro.backends.cpu.arguments import DTYPE_CODES, EmbeddingArgs, LinearArgs
from moestro.backends.cpu.buffers import new_empty
from moestro.backends.cpu.launch import Kernel, launch
from moestro.ops.registry import implements
from moestro.quant.format import WeightTensor

_LINEAR, _EMBEDDING = Kernel("linear"), Kernel("embedding")


def _fits(
    x: torch.Tensor, weight: torch.Tensor | WeightTensor, out_dtype: torch.dtype | None = None
) -> bool:
    if isinstance(weight, WeightTensor):
        if weight.packed or not weight.format.is_float:
            return False
        weight = weight.codes
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
    x: torch.Tensor, weight: torch.Tensor | WeightTensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    if isinstance(weight, WeightTensor):
        weight = weight.codes
    x, weight = x.contiguous(), weight.contiguous()
    tokens, out_features = x.shape[0], weight.shape[0]
    out = new_empty((tokens, out_features), out_dtype or x.dtype)
    arguments = LinearArgs(
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
    launch(_LINEAR, arguments, x, weight, out)
    return out


def _is_table(input_ids: torch.Tensor, weight: torch.Tensor) -> bool:
    return input_ids.dtype == torch.int64 and input_ids.dim() == 1 and weight.dim() == 2


@implements(ops.embedding, devices=("cpu",), when=_is_table, invariant=True)
def embedding(input_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    input_ids, weight = input_ids.contiguous(), weight.contiguous()
    vocab, hidden = weight.shape
    out = new_empty((input_ids.shape[0], hidden), weight.dtype)
    arguments = EmbeddingArgs(
        input_ids.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        input_ids.shape[0],
        vocab,
        hidden * weight.element_size(),
    )
    launch(_EMBEDDING, arguments, input_ids, weight, out)
    return out
