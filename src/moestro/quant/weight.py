"""What can be done with a weight of any format in the rows layout."""

import torch

from moestro.quant import fp8, int_group
from moestro.quant.format import WeightFormat, WeightTensor


def values(weight: WeightTensor) -> torch.Tensor:
    """The numbers it stands for: fp32 [..., M, K]."""
    _check_rows(weight)
    if weight.format.is_float:
        return weight.codes.float()
    if weight.format.name == "fp8":
        return fp8.dequantize(weight)
    return int_group.dequantize(weight)


def quantize(
    weight: torch.Tensor, weight_format: WeightFormat, *, paired: bool = False
) -> WeightTensor:
    """Float weights [..., M, K] in a format, each rounded to nearest. Raises ValueError."""
    if weight_format.is_float:
        codes = weight.to(getattr(torch, weight_format.name))
        return WeightTensor(weight_format, tuple(weight.shape), codes, paired=paired)
    if weight_format.name == "fp8":
        return fp8.quantize_rows(weight, weight_format, paired=paired)
    return int_group.quantize_rows(weight, weight_format, paired=paired)


def linear(x: torch.Tensor, weight: WeightTensor) -> torch.Tensor:
    """x [T, K] @ weight.T, fp32 [T, M], with the arithmetic that the weight's format asks for."""
    _check_rows(weight)
    if weight.format.is_float:
        return x.float() @ weight.codes.float().T
    if weight.format.name == "fp8":
        return fp8.linear(x, weight)
    return int_group.linear(x, weight)


def expert(weight: WeightTensor, index: int) -> WeightTensor:
    """One matrix of a stacked weight in the rows layout; nothing is copied."""
    _check_rows(weight)
    return WeightTensor(
        weight.format,
        weight.shape[1:],
        weight.codes[index],
        None if weight.scales is None else weight.scales[index],
        None if weight.zeros is None else weight.zeros[index],
        paired=weight.paired,
    )


def new_rows(
    weight_format: WeightFormat,
    shape: tuple[int, ...],
    *,
    paired: bool = False,
    device: torch.device | str = "cpu",
) -> WeightTensor:
    """An unfilled weight in the rows layout. Raises ValueError when groups don't divide K."""
    name = weight_format.name
    if weight_format.is_float:
        codes = torch.empty(shape, dtype=getattr(torch, name), device=device)
        return WeightTensor(weight_format, shape, codes, paired=paired)
    if name != "fp8":
        int_group.check_group_size(weight_format, shape[-1])
    width = shape[-1] // 2 if name == "w4a8" else shape[-1]
    dtype = {"w8a8": torch.int8, "w4a8": torch.uint8, "fp8": torch.float8_e4m3fn}[name]
    groups = (*shape[:-1], weight_format.num_groups(shape[-1]))
    return WeightTensor(
        weight_format,
        shape,
        torch.empty((*shape[:-1], width), dtype=dtype, device=device),
        torch.empty(groups, dtype=torch.float32, device=device),
        torch.empty(groups, dtype=torch.uint8, device=device) if weight_format.has_zeros else None,
        paired=paired,
    )


def _check_rows(weight: WeightTensor) -> None:
    if weight.packed:
        raise ValueError("a packed weight is read by its device only: unpack it first.")
