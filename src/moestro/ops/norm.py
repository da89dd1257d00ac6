"""RMSNorm, alone and fused with the residual addition."""

from collections.abc import Iterator

import torch

from moestro.ops.registry import op
from moestro.ops.testing import Case


def _cases() -> Iterator[Case]:
    yield from ()


@op(cases=_cases)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x: [..., N] of any float dtype; weight: [N]. Returns [..., N] in x's dtype. All arithmetic in
    fp32, rounded once (HF rounds before the weight multiplication too: at most 1 ulp apart).
    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return (x32 * scale * weight.float()).to(x.dtype)


@op(cases=_cases)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(s), s) with s = x + residual rounded to x's dtype.

    x, residual: [..., N] of one dtype; weight: [N]. Returns new tensors (normed, new residual).
    The norm reads the rounded sum, as the unfused pair would.
    """
    summed = (x.float() + residual.float()).to(x.dtype)
    return rms_norm.reference(summed, weight, eps), summed
