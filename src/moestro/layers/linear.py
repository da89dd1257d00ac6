"""A bias-free linear layer."""

import torch
from torch import nn

from moestro import ops


class Linear(nn.Module):
    """y = x @ weight.T. weight: [out_features, in_features]. Neither model family has biases."""

    def __init__(
        self, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=dtype, device=device), requires_grad=False
        )

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """[T, in_features] to [T, out_features], in out_dtype (default: x's dtype)."""
        y: torch.Tensor = ops.linear(x, self.weight, out_dtype)
        return y
