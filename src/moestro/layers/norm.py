"""RMSNorm, with and without the residual addition before it."""

import torch
from torch import nn

from moestro import ops
from moestro.layers.parameters import Parameters


class RMSNorm(nn.Module):
    """weight: [N]. `forward` normalises; `add` adds to the residual stream first."""

    def __init__(self, parameters: Parameters, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameters.tensor("weight", hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., N] to [..., N]."""
        y: torch.Tensor = ops.rms_norm(x, self.weight, self.eps)
        return y

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual), both [..., N] in x's dtype; None adds nothing."""
        if residual is None:
            return self(x), x
        y: tuple[torch.Tensor, torch.Tensor] = ops.add_rms_norm(x, residual, self.weight, self.eps)
        return y
