"""What the bytes of a weight mean: formats, and tensors that carry theirs.

This is the run-time half of quantisation. The rows layout is the byte spec and readable by anyone;
the packed layout is what one device's kernels read, and only that device understands it.
"""

from dataclasses import dataclass

import torch

from moestro.core.weight_format import FLOAT_FORMATS, INTEGER_FORMATS, WeightFormat

__all__ = ["FLOAT_FORMATS", "INTEGER_FORMATS", "WeightFormat", "WeightTensor", "float_weight"]

SYMMETRIC_ZERO = 8
"""The code of zero in a symmetric 4-bit format: codes are 0..15, values -8..7."""


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """A weight [M, K], or stacked ones [E, M, K], y = x @ weight.T.

    Rows layout (packed False):
      codes: [..., M, K] of the float type; int8 (w8a8); float8_e4m3fn (fp8); or [..., M, K / 2]
      uint8 (w4a8), two codes 0..15 a byte, the lower k in the lower four bits.
      scales: fp32 [..., M, num_groups], None for float formats.
      zeros: uint8 [..., M, num_groups] with has_zeros, else None.
      The value of a code is (code - zero) * scale.
    Packed layout (packed True): codes is one uint8 buffer holding everything.
    paired: the rows are two halves that are used together row by row (gate rows, then up rows);
      it changes where a device puts rows, never what they mean.
    """

    format: WeightFormat
    shape: tuple[int, ...]
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    packed: bool = False
    paired: bool = False

    @property
    def num_rows(self) -> int:
        """Rows M of one matrix."""
        return self.shape[-2]

    @property
    def in_features(self) -> int:
        return self.shape[-1]

    @property
    def num_experts(self) -> int | None:
        """E of a stacked weight; None for a single matrix."""
        return self.shape[0] if len(self.shape) == 3 else None

    @property
    def num_bytes(self) -> int:
        held = (self.codes, self.scales, self.zeros)
        return sum(t.nbytes for t in held if t is not None)


def float_weight(values: torch.Tensor, *, paired: bool = False) -> WeightTensor:
    """A plain float tensor [M, K] or [E, M, K] as a WeightTensor; nothing is copied."""
    name = str(values.dtype).removeprefix("torch.")
    if name not in FLOAT_FORMATS:
        raise ValueError(f"{name} is not a float weight format; these are: {FLOAT_FORMATS}.")
    return WeightTensor(WeightFormat(name), tuple(values.shape), values, paired=paired)
