"""ExpertCounter: how many tokens chose each expert of each MoE layer."""

import torch

from moestro.core.step import ExpertTokens
from moestro.layers.moe import moe_layers
from moestro.models.causal_lm import CausalLM

REPORT_STEPS = 64
REPORT_TOKENS = 8192
"""A report is due after as many steps or tokens, whatever comes first."""


class ExpertCounter:
    """Gives every MoE layer its row of one [layers, E] int64 tensor, and reads it now and then.

    The router's kernel adds to it; a step that does not report pays for one comparison.
    """

    def __init__(self, model: CausalLM) -> None:
        moe = model.spec.moe
        layers = moe_layers(model)
        experts = 0 if moe is None else moe.num_experts
        self._layers = tuple(layers)
        self._num_experts = experts
        self._counts = torch.zeros((len(layers), experts), dtype=torch.int64)
        for row, module in enumerate(layers.values()):
            module.expert_counts = self._counts[row]
        self._steps = self._tokens = 0

    def due(self, num_tokens: int) -> ExpertTokens | None:
        """To be called after each step of num_tokens: what was counted since, when it is time."""
        self._steps += 1
        self._tokens += num_tokens
        if self._steps < REPORT_STEPS and self._tokens < REPORT_TOKENS:
            return None
        return self.take()

    def take(self) -> ExpertTokens | None:
        """What was counted since the last time; None for a model without experts."""
        self._steps = self._tokens = 0
        if not self._layers:
            return None
        counts = self._counts.numpy().tobytes()
        self._counts.zero_()
        return ExpertTokens(self._layers, self._num_experts, counts)
