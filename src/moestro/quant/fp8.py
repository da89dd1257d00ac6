"""FP8 weights (E4M3 without infinities): the byte spec in plain torch.

Source: the OCP 8-bit floating point specification; torch.float8_e4m3fn. Largest value 448, smallest
normal 2^-6, smallest 2^-9; 0x7f and 0xff are NaN. Activations stay as they are.
"""

import torch

from moestro.quant.format import WeightFormat, WeightTensor

LARGEST = 448.0


def quantize_rows(
    weight: torch.Tensor, weight_format: WeightFormat, *, paired: bool = False
) -> WeightTensor:
    """Round float weights [..., M, K] to nearest: scale = amax / 448 a group, or a row.

    A group of zeros, or one so small that dividing by its scale overflows, has scale 0. Raises
    ValueError when a weight is not finite.
    """
    w = weight.float()
    if not torch.isfinite(w).all():
        raise ValueError("the weights hold NaN or infinity, which a scaled fp8 format can't.")
    width = w.shape[-1]
    size = weight_format.group_size or width
    num_groups = weight_format.num_groups(width)
    padded = torch.nn.functional.pad(w, (0, num_groups * size - width))
    groups = padded.unflatten(-1, (num_groups, size))
    scales = groups.abs().amax(-1) / LARGEST
    inverse = scales.reciprocal()
    usable = torch.isfinite(inverse)
    scales, inverse = scales.masked_fill(~usable, 0.0), inverse.masked_fill(~usable, 0.0)
    codes = (groups * inverse[..., None]).clamp_(-LARGEST, LARGEST).flatten(-2)[..., :width]
    stored = codes.to(torch.float8_e4m3fn).contiguous()
    return WeightTensor(weight_format, tuple(weight.shape), stored, scales, paired=paired)


def dequantize(weight: WeightTensor) -> torch.Tensor:
    """fp32 values [..., M, K] of a weight in the rows layout."""
    assert weight.scales is not None
    codes = weight.codes.float()
    size = weight.format.group_size
    if size == 0:
        return codes * weight.scales
    return codes * weight.scales.repeat_interleave(size, -1)[..., : weight.in_features]


def linear(x: torch.Tensor, weight: WeightTensor) -> torch.Tensor:
    """x [T, K] times one weight [M, K] in the rows layout: fp32 [T, M].

    y = sum over groups, in order, of scale * (fp32 sum of x * code); a kernel's order inside a
    group is its own.
    """
    assert weight.scales is not None
    x, codes = x.float(), weight.codes.float()
    size = weight.format.group_size or weight.in_features
    y = x.new_zeros((len(x), len(codes)))
    for g in range(weight.scales.shape[-1]):
        sums = x[:, g * size : (g + 1) * size] @ codes[:, g * size : (g + 1) * size].T
        y = torch.addcmul(y, sums, weight.scales[:, g])
    return y


def has_nan(codes: torch.Tensor) -> bool:
    """Whether a NaN code (0x7f, 0xff) is among E4M3 codes."""
    return bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any())
