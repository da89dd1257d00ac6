"""What the bytes of cached keys and values mean: one row of a head's D numbers, and its scale.

A float cache keeps numbers as they are. int8 and fp8 keep a code a number and one fp32 scale a row,
that is per token and per kv head, apart for keys and for values.
"""

import torch

KV_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
"""The element type of a kv_cache_dtype."""
LARGEST_CODE: dict[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""What the largest magnitude of a row becomes. Types listed here carry scales."""


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] of any float type to codes [..., D] of `dtype` and scales fp32 [...].

    In fp32: amax = max |x|. int8: codes = clamp(rne(x * (127 / amax)), -127, 127), scale =
    amax / 127. fp8 (E4M3): scale = amax / 448, codes = x / scale clamped to +-448 and rounded to
    the nearest, ties to even. Where amax is 0, or so small (below 3.8e-37) that its inverse
    overflows, codes and scale are 0. A row that holds NaN or infinity has codes 0 and scale NaN.
    """
    largest = LARGEST_CODE[dtype]
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True)
    finite = torch.isfinite(amax)
    # division by a tensor: torch makes `number / tensor` a reciprocal and a product
    inverse = torch.tensor(127.0).div(amax)
    usable = finite & torch.isfinite(inverse)
    scales = torch.where(usable, amax / largest, 0.0)
    scaled = (x * inverse).round() if dtype == torch.int8 else x / scales
    codes = torch.where(usable, scaled.clamp(-largest, largest), 0.0).to(dtype)
    return codes, scales.masked_fill(~finite, torch.nan).squeeze(-1)


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """codes [..., D] times scales [...], fp32. Without scales the codes are the numbers."""
    values = codes.float()
    return values if scales is None else values * scales.unsqueeze(-1)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] times Sylvester's Hadamard matrix, scaled by D^-1/2 to be orthogonal.

    D is a power of two. Both q and k are rotated, so that q k^T stays while outliers spread over
    the row. In fp32, by butterflies of distance 1, 2, 4, ..., then one multiplication; rounded once
    to x's dtype. Source: Ashkboos et al. 2024 (QuaRot), https://arxiv.org/abs/2404.00456.
    """
    dim = x.shape[-1]
    if dim < 1 or dim & (dim - 1):
        raise ValueError(f"a Hadamard rotation needs a power of two, the head dimension is {dim}.")
    y = x.float()
    distance = 1
    while distance < dim:
        pairs = y.reshape(*x.shape[:-1], dim // (2 * distance), 2, distance)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((low + high, low - high), dim=-2).reshape(x.shape)
        distance *= 2
    return (y * torch.tensor(dim**-0.5, dtype=torch.float32)).to(x.dtype)
