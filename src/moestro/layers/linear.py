"""A bias-free linear layer."""

import torch
from torch import nn

from moestro import ops
from moestro.layers.parameters import Parameters


class Linear(nn.Module):
    """y = x @ weight.T. weight: [out_features, in_features]. Neither model family has biases.

    paired: the rows are gate rows, then up rows.
    """

    def __init__(
        self,
        parameters: Parameters,
        in_features: int,
        out_features: int,
        *,
        paired: bool = False,
    ) -> None:
        super().__init__()
        self.weight = parameters.weight("weight", out_features, in_features, paired=paired)

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """[T, in_features] to [T, out_features], in out_dtype (default: x's dtype)."""
        y: torch.Tensor = ops.linear(x, self.weight, out_dtype)
        return y
