"""The token embedding table."""

import torch
from torch import nn

from moestro import ops
from moestro.layers.parameters import Parameters


class Embedding(nn.Module):
    """Looks up rows of weight [V, N], a plain tensor; neither model family scales them."""

    def __init__(self, parameters: Parameters, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = parameters.tensor("weight", vocab_size, hidden_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: [T] int64. Returns [T, N] in the table's dtype."""
        rows: torch.Tensor = ops.embedding(input_ids, self.weight)
        return rows
