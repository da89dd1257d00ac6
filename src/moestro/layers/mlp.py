"""The dense SwiGLU feed-forward block."""

import torch
from torch import nn

from moestro import ops
from moestro.layers.linear import Linear
from moestro.layers.parameters import Parameters


class MLP(nn.Module):
    """down(silu(gate x) * up x); gate_up_proj.weight holds the gate rows, then the up rows."""

    def __init__(self, parameters: Parameters, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        inner = parameters.within("gate_up_proj")
        self.gate_up_proj = Linear(inner, hidden_size, 2 * intermediate_size, paired=True)
        self.down_proj = Linear(parameters.within("down_proj"), intermediate_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, N] to [T, N]."""
        y: torch.Tensor = self.down_proj(ops.silu_and_mul(self.gate_up_proj(x)))
        return y
