"""The token embedding table."""

import torch
from torch import nn

from moestro import ops


class Embedding(nn.Module):
    """Looks up rows of weight [V, N]; neither model family scales them."""

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(vocab_size, hidden_size, dtype=dtype, device=device), requires_grad=False
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: [T] int64. Returns [T, N] in the table's dtype."""
        rows: torch.Tensor = ops.embedding(input_ids, self.weight)
        return rows
