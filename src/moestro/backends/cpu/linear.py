"""Matrix product and embedding lookup on the native library."""

import torch

from moestro import ops
from moestro.backends.cpu.arguments import DTYPE_CODES, EmbeddingArgs, LinearArgs
from moestro.backends.cpu.buffers import new_empty
from moestro.backends.cpu.launch import Kernel, launch
from moestro.backends.cpu.packing import describe, has_packed_form, pack, unpack_rows
from moestro.ops.registry import implements
from moestro.quant.format import WeightTensor, float_weight

_LINEAR, _EMBEDDING = Kernel("linear"), Kernel("embedding")


def takes_weight(x_dtype: torch.dtype, weight: torch.Tensor | WeightTensor) -> bool:
    """Whether the kernels multiply rows of x_dtype with a weight of this format."""
    if isinstance(weight, torch.Tensor):
        return weight.dtype in DTYPE_CODES and x_dtype in (weight.dtype, torch.float32)
    if weight.format.is_float and x_dtype != torch.float32:
        return str(x_dtype) == f"torch.{weight.format.name}"
    return has_packed_form(weight.format, weight.in_features)


def packed_form(weight: torch.Tensor | WeightTensor, *, paired: bool | None = None) -> WeightTensor:
    """The weight packed; what is not is packed for this call."""
    if isinstance(weight, torch.Tensor):
        return pack(float_weight(weight, paired=paired or False))
    if weight.packed:
        return weight
    if paired is not None and weight.paired != paired:
        weight = WeightTensor(
            weight.format, weight.shape, weight.codes, weight.scales, weight.zeros, paired=paired
        )
    return pack(weight)


def _fits(
    x: torch.Tensor, weight: torch.Tensor | WeightTensor, out_dtype: torch.dtype | None = None
) -> bool:
    return (
        x.dtype in DTYPE_CODES
        and (out_dtype is None or out_dtype in DTYPE_CODES)
        and x.dim() == 2
        and len(weight.shape) == 2
        and x.shape[1] == weight.shape[1] > 0
        and takes_weight(x.dtype, weight)
    )


@implements(ops.linear, devices=("cpu",), when=_fits, invariant=True)
def linear(
    x: torch.Tensor, weight: torch.Tensor | WeightTensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    x = x if x.is_contiguous() else x.contiguous()
    packed = packed_form(weight)
    out = new_empty((x.shape[0], packed.num_rows), out_dtype or x.dtype)
    arguments = LinearArgs(
        x.data_ptr(),
        out.data_ptr(),
        describe(packed),
        x.shape[0],
        DTYPE_CODES[x.dtype],
        DTYPE_CODES[out.dtype],
    )
    launch(_LINEAR, arguments, x, packed.codes, out)
    return out


def _is_table(input_ids: torch.Tensor, weight: torch.Tensor | WeightTensor) -> bool:
    return (
        input_ids.dtype == torch.int64
        and input_ids.dim() == 1
        and len(weight.shape) == 2
        and (isinstance(weight, torch.Tensor) or weight.format.is_float)
    )


@implements(ops.embedding, devices=("cpu",), when=_is_table, invariant=True)
def embedding(input_ids: torch.Tensor, weight: torch.Tensor | WeightTensor) -> torch.Tensor:
    input_ids = input_ids if input_ids.is_contiguous() else input_ids.contiguous()
    if isinstance(weight, WeightTensor):
        if weight.packed:
            return unpack_rows(weight, input_ids)
        weight = weight.codes
    weight = weight if weight.is_contiguous() else weight.contiguous()
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
