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
from moestro.layers.rotary import RotaryTable
from moestro.models.causal_lm import CausalLM, Trunk


class Qwen3MoeModel(Trunk):
    """The trunk: embedding, decoder layers, final norm."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, dtype, device)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, is_moe, dtype, device) for is_moe in spec.moe_layers
        )
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype, device)
        self.rotary = RotaryTable(spec.rope, spec.head_dim, device)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_pages: Sequence[ops.KVPages],
        attn: ops.AttentionMetadata,
    ) -> torch.Tensor:
        """See Trunk.forward."""
        cos_sin = self.rotary.rows(positions, attn.max_seq_len)
        x = self.embed_tokens(input_ids)
        residual = torch.zeros_like(x)
        for layer, pages in zip(self.layers, kv_pages, strict=False):
            x, residual = layer(x, residual, cos_sin, pages, attn)
        hidden_states, _ = self.norm.add(x, residual)
        return hidden_states


class Qwen3MoeForCausalLM(CausalLM):
    """model_type qwen3_moe."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device | str,
        num_mtp_layers: int,
    ) -> None:
        if num_mtp_layers:
            raise UnsupportedError(
                f"qwen3_moe has no MTP layer, {num_mtp_layers} were asked for; use 0."
            )
        super().__init__(spec, Qwen3MoeModel(spec, dtype, device), dtype, device, 0)
