"""Hy3 (Hy3, Hy3-preview, Hy-MT2-30B-A3B): sigmoid router with expert bias, shared expert, MTP."""

from collections.abc import Sequence

import torch
from torch import nn

from moestro import ops
from moestro.core.model_spec import ModelSpec
from moestro.errors import UnsupportedError
from moestro.layers.decoder import DecoderLayer
from moestro.layers.embedding import Embedding
from moestro.layers.linear import Linear
from moestro.layers.norm import RMSNorm
from moestro.layers.parameters import Parameters
from moestro.layers.rotary import RotaryTable
from moestro.models.causal_lm import CausalLM, Trunk


class HyV3MTPLayer(DecoderLayer):
    """Multi-token prediction: from the hidden state at i and token i + 1 to the one at i + 1.

    Source: the released checkpoint's layout and Tencent's trainer (embedding before hidden state
    in the concatenation, embedding zeroed at position 0, hidden state after the final norm).
    """

    def __init__(self, parameters: Parameters, spec: ModelSpec) -> None:
        super().__init__(parameters, spec, True)
        hidden, eps = spec.hidden_size, spec.rms_norm_eps
        self.enorm = RMSNorm(parameters.within("enorm"), hidden, eps)
        self.hnorm = RMSNorm(parameters.within("hnorm"), hidden, eps)
        self.eh_proj = Linear(parameters.within("eh_proj"), 2 * hidden, hidden)
        self.final_layernorm = RMSNorm(parameters.within("final_layernorm"), hidden, eps)

    def join(
        self, hidden_states: torch.Tensor, next_embeddings: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The layer's input from h_i and the embedding of token i + 1: [T, N]."""
        joined = ops.mtp_input(
            next_embeddings,
            hidden_states,
            positions,
            self.enorm.weight,
            self.hnorm.weight,
            self.enorm.eps,
        )
        x: torch.Tensor = self.eh_proj(joined)
        return x


class HyV3Model(Trunk):
    """The trunk: embedding, decoder layers, final norm. MTP layers follow in `layers`."""

    def __init__(self, parameters: Parameters, spec: ModelSpec, num_mtp_layers: int) -> None:
        super().__init__()
        inner, hidden = parameters.within, spec.hidden_size
        self.embed_tokens = Embedding(inner("embed_tokens"), spec.vocab_size, hidden)
        self.layers = nn.ModuleList(
            DecoderLayer(inner(f"layers.{i}"), spec, is_moe)
            for i, is_moe in enumerate(spec.moe_layers)
        )
        self.num_trunk_layers = len(self.layers)
        self.layers.extend(
            HyV3MTPLayer(inner(f"layers.{self.num_trunk_layers + i}"), spec)
            for i in range(num_mtp_layers)
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
        for i in range(self.num_trunk_layers):
            x, residual = self.layers[i](x, residual, rotary, kv_pages[i], attn)
        hidden_states, _ = self.norm.add(x, residual)
        return hidden_states

    def mtp_forward(
        self,
        hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        pages: ops.KVPages,
        attn: ops.AttentionMetadata,
        index: int,
    ) -> torch.Tensor:
        """See Trunk.mtp_forward."""
        layer = self._mtp_layer(index)
        rotary = ops.Rotary(self.rotary.up_to(attn.max_seq_len), positions)
        attn = attn.planned(pages, self.num_heads)
        x = layer.join(hidden_states, self.embed_tokens(next_token_ids), positions)
        x, residual = layer(x, None, rotary, pages, attn)
        hidden_states, _ = layer.final_layernorm.add(x, residual)
        return hidden_states

    def mtp_store(
        self,
        hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        rotary: ops.Rotary,
        pages: ops.KVPages,
        slot_mapping: torch.Tensor,
        index: int,
    ) -> None:
        """See Trunk.mtp_store."""
        layer = self._mtp_layer(index)
        x = layer.join(hidden_states, self.embed_tokens(next_token_ids), rotary.positions)
        layer.self_attn.store(layer.input_layernorm(x), rotary, pages, slot_mapping)

    def _mtp_layer(self, index: int) -> HyV3MTPLayer:
        layer = self.layers[self.num_trunk_layers + index]
        assert isinstance(layer, HyV3MTPLayer)
        return layer


class HyV3ForCausalLM(CausalLM):
    """model_type hy_v3."""

    def __init__(self, parameters: Parameters, spec: ModelSpec, num_mtp_layers: int) -> None:
        if num_mtp_layers and spec.moe is None:
            raise UnsupportedError("an MTP layer of hy_v3 has experts, but this config has none.")
        trunk = HyV3Model(parameters.within("model"), spec, num_mtp_layers)
        super().__init__(parameters, spec, trunk, num_mtp_layers)
