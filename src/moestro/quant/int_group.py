"""Integer weights (w8a8, w4a8) and int8 activations: the byte spec in plain torch.

Weights are rounded to nearest (RTN):
- w8a8: scale = amax / 127 a row, codes = rne(w / scale) in [-127, 127].
- w4a8, symmetric: the weight of largest magnitude in a group, sign included, becomes -8, the one
  code without a mirror image: scale = extreme / -8, so a scale may be negative; codes =
  clamp(rne(w / scale) + 8, 0, 15). The scale is rounded to bfloat16 before codes are chosen, so
  that it may be kept in 16 bits.
- w4a8 with zeros: scale = (max(w, 0) - min(w, 0)) / 15, rounded likewise, zero = rne(-min / scale).
A group of zeros, or one so small that dividing by its scale overflows, has scale 0.

The arithmetic of a product is exact in the integers and fixed in fp32; a kernel gives these bits,
but for the last one of a multiply-add (see linear).
"""

import torch

from moestro.quant.format import SYMMETRIC_ZERO, WeightFormat, WeightTensor

_EXACT_SUM = 1024
"""Products |a * w| <= 127 * 128 of which fp32 adds this many exactly, in any order."""
_LARGEST_CODE = 127
_LARGEST_NIBBLE = 15


def quantize_rows(
    weight: torch.Tensor, weight_format: WeightFormat, *, paired: bool = False
) -> WeightTensor:
    """Round float weights [..., M, K] to nearest. Raises ValueError: not finite, K not divided."""
    check_group_size(weight_format, weight.shape[-1])
    w = weight.float()
    if not torch.isfinite(w).all():
        raise ValueError("the weights hold NaN or infinity, which integers can't.")
    shape = tuple(weight.shape)
    if weight_format.name == "w8a8":
        scales = w.abs().amax(-1, keepdim=True) / _LARGEST_CODE
        codes = (w * _inverse(scales)).round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE)
        return WeightTensor(weight_format, shape, codes.to(torch.int8), scales, paired=paired)
    groups = w.unflatten(-1, (-1, weight_format.group_size))
    scales, zeros = _nibble_scales(groups, weight_format.has_zeros)
    shift = SYMMETRIC_ZERO if zeros is None else zeros[..., None].float()
    codes = (groups * _inverse(scales)[..., None]).round_().add_(shift).clamp_(0, _LARGEST_NIBBLE)
    packed = pack_nibbles(codes.to(torch.uint8).flatten(-2))
    return WeightTensor(weight_format, shape, packed, scales, zeros, paired=paired)


def _nibble_scales(
    groups: torch.Tensor, has_zeros: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """groups: [..., G, group_size] fp32. Returns scales fp32 and zeros uint8, [..., G] each."""
    low, high = groups.amin(-1), groups.amax(-1)
    if not has_zeros:
        extreme = torch.where(high >= -low, high, low)
        return (extreme / -SYMMETRIC_ZERO).bfloat16().float(), None
    low = low.clamp(max=0)
    scales = ((high.clamp(min=0) - low) / _LARGEST_NIBBLE).bfloat16().float()
    zeros = (-low * _inverse(scales)).round_().clamp_(0, _LARGEST_NIBBLE)
    return scales, zeros.to(torch.uint8)


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """1 / scale; 0 for scales that are 0 or so small that this overflows. Those become 0 too."""
    inverse = scales.reciprocal()
    usable = torch.isfinite(inverse)
    scales.masked_fill_(~usable, 0.0)
    return inverse.masked_fill_(~usable, 0.0)


def check_group_size(weight_format: WeightFormat, in_features: int) -> None:
    """Raise ValueError unless whole groups make up a row of an integer format."""
    size = weight_format.group_size
    if weight_format.name == "w8a8":
        if size:
            raise ValueError(f"w8a8 has one scale a row, not one for each {size} weights.")
    elif size <= 0 or size % 2 or in_features % size:
        raise ValueError(
            f"a w4a8 weight of {in_features} columns can't be cut into groups of {size}: the "
            "group size must be even and divide the columns."
        )


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 [..., K], K even, to [..., K / 2]: the lower k in the lower four bits."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of pack_nibbles."""
    low, high = packed & _LARGEST_NIBBLE, packed >> 4
    return torch.stack((low, high), dim=-1).flatten(-2)


def signed_codes(weight: WeightTensor) -> torch.Tensor:
    """code - zero of every weight: int8 [..., M, K], in [-127, 127] or [-15, 15]."""
    if weight.format.name == "w8a8":
        return weight.codes
    codes = unpack_nibbles(weight.codes).to(torch.int8)
    if weight.zeros is None:
        return codes - SYMMETRIC_ZERO
    zeros = weight.zeros.to(torch.int8).repeat_interleave(weight.format.group_size, -1)
    return codes - zeros


def dequantize(weight: WeightTensor) -> torch.Tensor:
    """fp32 values [..., M, K] of a weight in the rows layout."""
    assert weight.scales is not None
    codes = signed_codes(weight).float()
    if weight.format.name == "w8a8":
        return codes * weight.scales
    groups: torch.Tensor = codes.unflatten(-1, (-1, weight.format.group_size))
    return (groups * weight.scales[..., None]).flatten(-2)


def quantize_activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] of any float type to codes int8 [T, K] and scales fp32 [T].

    In fp32: amax = max |x|, inv = 127 / amax, codes = clamp(rne(x * inv), -127, 127), scale =
    amax / 127. Where inv overflows (amax below 3.8e-37, or 0) codes and scale are 0. A row that
    holds NaN or infinity has codes 0 and scale NaN.
    """
    x = x.float()
    if x.shape[1] == 0:
        return x.to(torch.int8), x.new_zeros(len(x))
    amax = x.abs().amax(-1)
    finite = torch.isfinite(amax)
    inverse = torch.full_like(amax, _LARGEST_CODE) / amax  # 127 / amax would be 127 * (1 / amax)
    usable = finite & torch.isfinite(inverse)
    scaled = torch.where(usable[:, None], x * inverse[:, None], 0.0)
    codes = scaled.round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE).to(torch.int8)
    scales = torch.where(usable, amax / _LARGEST_CODE, 0.0).masked_fill_(~finite, torch.nan)
    return codes, scales


def linear(x: torch.Tensor, weight: WeightTensor) -> torch.Tensor:
    """x [T, K] times one weight [M, K] in the rows layout: fp32 [T, M], x quantised per token.

    w8a8: y = (float(sum of products) * w_scale) * x_scale. w4a8: y = fma(float(sum of a group's
    products), scale, y) over the groups in order, then y * x_scale. The fma is computed in double
    and rounded to fp32, which differs from a true one where the double was a tie: about never.
    """
    codes, x_scales = quantize_activations(x)
    return linear_codes(codes, x_scales, weight)


def linear_codes(codes: torch.Tensor, x_scales: torch.Tensor, weight: WeightTensor) -> torch.Tensor:
    """As linear, for activations that are quantised already: int8 [T, K], fp32 [T]."""
    assert weight.scales is not None
    a, w = codes.float(), signed_codes(weight).float()
    if weight.format.name == "w8a8":
        sums = a.new_zeros((len(a), len(w)), dtype=torch.float64)
        for k in range(0, a.shape[1], _EXACT_SUM):
            sums += a[:, k : k + _EXACT_SUM] @ w[:, k : k + _EXACT_SUM].T
        return sums.float() * weight.scales[:, 0] * x_scales[:, None]
    y = a.new_zeros((len(a), len(w)))
    size = weight.format.group_size
    for g in range(weight.scales.shape[-1]):
        sums = a[:, g * size : (g + 1) * size] @ w[:, g * size : (g + 1) * size].T
        y = torch.addcmul(y.double(), sums.double(), weight.scales[:, g].double()).float()
    return y * x_scales[:, None]
