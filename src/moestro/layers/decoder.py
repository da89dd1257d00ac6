"""One pre-norm decoder layer: attention, then experts or a dense MLP."""

import torch
from torch import nn

from moestro import ops
from moestro.core.model_spec import ModelSpec
from moestro.layers.attention import Attention
from moestro.layers.mlp import MLP
from moestro.layers.moe import MoE
from moestro.layers.norm import RMSNorm
from moestro.layers.parameters import Parameters


class DecoderLayer(nn.Module):
    """x += attn(norm(x)); x += mlp(norm(x)), with x (the residual stream) in the model's dtype.

    What a block adds is handed on and added by the next norm, in one op. is_moe: whether mlp is
    spec.moe's experts or the dense MLP.
    """

    def __init__(self, parameters: Parameters, spec: ModelSpec, is_moe: bool) -> None:
        super().__init__()
        hidden, eps = spec.hidden_size, spec.rms_norm_eps
        inner = parameters.within
        self.input_layernorm = RMSNorm(inner("input_layernorm"), hidden, eps)
        self.self_attn = Attention(inner("self_attn"), spec)
        self.post_attention_layernorm = RMSNorm(inner("post_attention_layernorm"), hidden, eps)
        self.mlp: MoE | MLP
        if is_moe:
            assert spec.moe is not None
            self.mlp = MoE(inner("mlp"), spec.moe, hidden)
        else:
            self.mlp = MLP(inner("mlp"), hidden, spec.intermediate_size)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotary: ops.Rotary,
        pages: ops.KVPages,
        attn: ops.AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes and returns (what is still to be added to the stream, the stream), [T, N] each.

        The first layer gets (embeddings, None). Mutates pages.
        """
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, rotary, pages, attn)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual
