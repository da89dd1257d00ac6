"""Weights in the layout of the native kernels (csrc/packed.h)."""

from ctypes import byref

import torch

from moestro.backends.cpu.arguments import PackArgs, PackedWeight
from moestro.backends.cpu.buffers import new_empty
from moestro.backends.cpu.launch import Kernel, launch
from moestro.backends.cpu.library import native
from moestro.errors import UnsupportedError
from moestro.quant.format import WeightFormat, WeightTensor
from moestro.quant.weight import new_rows

LAYOUT_VERSION = 1
"""Rises whenever the same weight gets other bytes: packed weights are kept on disk."""
_PACK, _UNPACK = Kernel("pack"), Kernel("unpack")
_FORMATS = {"float32": 0, "bfloat16": 1, "float16": 2, "w8a8": 3, "w4a8": 4, "fp8": 5}
_ZEROS, _FP32_SCALES, _PAIRED = 1, 2, 4
_LARGEST_FP8_GROUP = 512
_LARGEST_INT8_WIDTH = 65536
NO_WEIGHT = PackedWeight()


def has_packed_form(weight_format: WeightFormat, in_features: int) -> bool:
    """Whether the kernels take this format at this width."""
    size = weight_format.group_size
    if weight_format.name == "w4a8":
        return size > 0 and size % 8 == 0 and in_features % size == 0
    if weight_format.name == "fp8":
        return 0 <= size <= _LARGEST_FP8_GROUP and size % 4 == 0
    narrow = weight_format.name != "w8a8" or in_features <= _LARGEST_INT8_WIDTH
    return weight_format.name in _FORMATS and size == 0 and narrow


def packed_bytes(weight_format: WeightFormat, shape: tuple[int, ...], *, paired: bool) -> int:
    """Bytes of a weight of this shape [M, K] or [E, M, K]. Raises UnsupportedError."""
    size: int = native().packed_bytes(byref(_describe(weight_format, shape, paired, None)))
    if size < 0:
        raise UnsupportedError(native().last_error().decode())
    return size


def new_packed(
    weight_format: WeightFormat, shape: tuple[int, ...], *, paired: bool = False
) -> WeightTensor:
    """A packed weight that holds nothing yet."""
    codes = new_empty((packed_bytes(weight_format, shape, paired=paired),), torch.uint8)
    return WeightTensor(weight_format, shape, codes, packed=True, paired=paired)


def pack_rows(
    target: WeightTensor, rows: WeightTensor, *, expert: int | None = None, start: int = 0
) -> None:
    """Write rows [start, start + n) of a packed weight, or of one expert of it.

    rows: n rows in the rows layout, of the target's format. A vector of rows is complete, zeros
    past the last one included, when all its rows have been written. Raises ValueError for rows
    outside the target and for scales that need fp32_scales.
    """
    if rows.format != target.format or rows.in_features != target.in_features:
        raise ValueError(
            f"rows of {rows.format}, {rows.in_features} wide, are no part of a weight of "
            f"{target.format}, {target.in_features} wide"
        )
    codes, scales, zeros = (_dense(t) for t in (rows.codes, rows.scales, rows.zeros))
    assert codes is not None
    arguments = PackArgs(
        describe(target),
        codes.data_ptr(),
        None if scales is None else scales.data_ptr(),
        None if zeros is None else zeros.data_ptr(),
        None,
        expert or 0,
        start,
        rows.num_rows,
    )
    held = (t for t in (scales, zeros) if t is not None)
    launch(_PACK, arguments, target.codes, codes, *held)


def pack(rows: WeightTensor) -> WeightTensor:
    """A whole weight, packed."""
    target = new_packed(rows.format, rows.shape, paired=rows.paired)
    for expert in range(rows.num_experts or 1):
        pack_rows(
            target, rows if rows.num_experts is None else _expert(rows, expert), expert=expert
        )
    return target


def unpack(target: WeightTensor) -> WeightTensor:
    """The rows layout of a packed weight, bit for bit."""
    rows = new_rows(target.format, target.shape, paired=target.paired)
    for expert in range(target.num_experts or 1):
        part = rows if target.num_experts is None else _expert(rows, expert)
        _unpack(target, part, None, expert)
    return rows


def unpack_rows(target: WeightTensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of a packed float matrix: [len(ids), K]. ids: int64. Raises ValueError."""
    dtype: torch.dtype = getattr(torch, target.format.name)
    codes = new_empty((len(ids), target.in_features), dtype)
    _unpack(target, WeightTensor(target.format, tuple(codes.shape), codes), ids, 0)
    return codes


def describe(weight: WeightTensor) -> PackedWeight:
    """A packed weight as the kernels know it."""
    return _describe(weight.format, weight.shape, weight.paired, weight.codes.data_ptr())


def _unpack(
    target: WeightTensor, rows: WeightTensor, ids: torch.Tensor | None, expert: int
) -> None:
    arguments = PackArgs(
        describe(target),
        rows.codes.data_ptr(),
        None if rows.scales is None else rows.scales.data_ptr(),
        None if rows.zeros is None else rows.zeros.data_ptr(),
        None if ids is None else ids.data_ptr(),
        expert,
        0,
        rows.num_rows,
    )
    held = (t for t in (rows.scales, rows.zeros, ids) if t is not None)
    launch(_UNPACK, arguments, target.codes, rows.codes, *held)


def _describe(
    weight_format: WeightFormat, shape: tuple[int, ...], paired: bool, data: int | None
) -> PackedWeight:
    flags = _ZEROS * weight_format.has_zeros | _FP32_SCALES * weight_format.fp32_scales
    return PackedWeight(
        data,
        shape[0] if len(shape) == 3 else 1,
        shape[-2],
        shape[-1],
        _FORMATS[weight_format.name],
        weight_format.group_size,
        flags | _PAIRED * paired,
        0,
    )


def _expert(rows: WeightTensor, index: int) -> WeightTensor:
    scales, zeros = (None if t is None else t[index] for t in (rows.scales, rows.zeros))
    return WeightTensor(rows.format, rows.shape[1:], rows.codes[index], scales, zeros)


def _dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or tensor.is_contiguous():
        return tensor
    return tensor.contiguous()
