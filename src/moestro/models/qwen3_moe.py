"""Qwen3-MoE (30B-A3B, 235B-A22B, Coder): softmax router, no shared expert, dense layers by list."""

from collections.abc import Sequence

import torch
from torch import nn

from moestro import ops
from moestro.core.model_spec import ModelSpec
from moestro.errors import UnsupportedError
from moestro.layers.decoder import DecoderLayer
from moestro.layers.embedding import Embedding
from moestro.layers.norm import RMSNorm
from moestro.layers.parameters import Parameters
from moestro.layers.rotary import RotaryTable
from moestro.models.causal_lm import CausalLM, Trunk


class Qwen3MoeModel(Trunk):
    """The trunk: embedding, decoder layers, final norm."""

    def __init__(self, parameters: Parameters, spec: ModelSpec) -> None:
        super().__init__()
        inner, hidden = parameters.within, spec.hidden_size
        self.embed_tokens = Embedding(inner("embed_tokens"), spec.vocab_size, hidden)
        self.layers = nn.ModuleList(
            DecoderLayer(inner(f"layers.{i}"), spec, is_moe)
            for i, is_moe in enumerate(spec.moe_layers)
        )
        self.norm = RMSNorm(inner("norm"), hidden, spec.rms_norm_eps)
        self.num_heads = spec.num_attention_heads
        self.rotary = RotaryTable(spec.rope, spec.head_dim, parameters.device)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_pages: Sequence[ops.KVPages],
        attn: ops.AttentionMetadata,
    ) -> torch.Tensor:
        """See Trunk.forward."""
        rotary = ops.Rotary(self.rotary.up_to(attn.max_seq_len), positions)
        attn = attn.planned(kv_pages[0], self.num_heads)
        x, residual = self.embed_tokens(input_ids), None
        for layer, pages in zip(self.layers, kv_pages, strict=False):
            x, residual = layer(x, residual, rotary, pages, attn)
        hidden_states, _ = self.norm.add(x, residual)
        return hidden_states


class Qwen3MoeForCausalLM(CausalLM):
    """model_type qwen3_moe."""

    def __init__(self, parameters: Parameters, spec: ModelSpec, num_mtp_layers: int) -> None:
        if num_mtp_layers:
            raise UnsupportedError(
                f"qwen3_moe has no MTP layer, {num_mtp_layers} were asked for; use 0."
            )
        super().__init__(parameters, spec, Qwen3MoeModel(parameters.within("model"), spec), 0)
