"""Grouped-query attention with per-head norms, rotary embedding and a paged KV cache."""

import torch
from torch import nn

from moestro import ops
from moestro.core.model_spec import ModelSpec
from moestro.layers.linear import Linear
from moestro.layers.norm import RMSNorm
from moestro.layers.parameters import Parameters


class Attention(nn.Module):
    """qkv_proj -> per-head norm, rotation and store -> paged attention -> o_proj."""

    def __init__(self, parameters: Parameters, spec: ModelSpec) -> None:
        super().__init__()
        self.num_heads = spec.num_attention_heads
        self.num_kv_heads = spec.num_key_value_heads
        self.eps = spec.rms_norm_eps
        self.scale = spec.head_dim**-0.5
        hidden, head_dim = spec.hidden_size, spec.head_dim
        heads = self.num_heads + 2 * self.num_kv_heads
        self.qkv_proj = Linear(parameters.within("qkv_proj"), hidden, heads * head_dim)
        self.q_norm = RMSNorm(parameters.within("q_norm"), head_dim, self.eps)
        self.k_norm = RMSNorm(parameters.within("k_norm"), head_dim, self.eps)
        self.o_proj = Linear(parameters.within("o_proj"), self.num_heads * head_dim, hidden)

    def forward(
        self,
        x: torch.Tensor,
        rotary: ops.Rotary,
        pages: ops.KVPages,
        attn: ops.AttentionMetadata,
    ) -> torch.Tensor:
        """x: [T, N]. Returns [T, N]; mutates pages."""
        q = self.store(x, rotary, pages, attn.slot_mapping)
        heads: torch.Tensor = ops.paged_attention(q, pages, attn, self.scale)
        out: torch.Tensor = self.o_proj(heads.flatten(1))
        return out

    def store(
        self, x: torch.Tensor, rotary: ops.Rotary, pages: ops.KVPages, slot_mapping: torch.Tensor
    ) -> torch.Tensor:
        """Keys and values of x into their slots, all that later tokens need of these. Returns q."""
        q: torch.Tensor = ops.qk_norm_rope_store(
            self.qkv_proj(x),
            self.q_norm.weight,
            self.k_norm.weight,
            rotary,
            self.eps,
            pages,
            slot_mapping,
        )
        return q
