"""The dense SwiGLU feed-forward block."""

import torch
from torch import nn

from moestro import ops
from moestro.layers.linear import Linear


class MLP(nn.Module):
    """down(silu(gate x) * up x); gate_up_proj.weight holds the gate rows, then the up rows."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, dtype, device)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, N] to [T, N]."""
        y: torch.Tensor = self.down_proj(ops.silu_and_mul(self.gate_up_proj(x)))
        return y
