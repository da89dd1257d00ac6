"""CausalLM: what the runner and the weight loader see of any model."""

from collections.abc import Sequence

import torch
from torch import nn

from moestro import ops
from moestro.core.model_spec import ModelSpec
from moestro.errors import UnsupportedError
from moestro.layers.embedding import Embedding
from moestro.layers.linear import Linear


class Trunk(nn.Module):
    """Everything below the head; one class a model family."""

    embed_tokens: Embedding

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_pages: Sequence[ops.KVPages],
        attn: ops.AttentionMetadata,
    ) -> torch.Tensor:
        """input_ids, positions: [T] int64. Returns [T, N] after the final norm."""
        raise NotImplementedError

    def mtp_forward(
        self,
        hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        pages: ops.KVPages,
        attn: ops.AttentionMetadata,
        index: int,
    ) -> torch.Tensor:
        """One step of MTP layer `index`, on its own pages; see CausalLM.mtp_forward."""
        raise NotImplementedError


class CausalLM(nn.Module):
    """A decoder-only language model over paged KV: a trunk and a head.

    Layer i reads and writes kv_pages[i]; MTP layer j kv_pages[spec.num_hidden_layers + j].
    lm_head is None when the embedding table serves as the head too.
    """

    def __init__(
        self,
        spec: ModelSpec,
        model: Trunk,
        dtype: torch.dtype,
        device: torch.device | str,
        num_mtp_layers: int,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.num_mtp_layers = num_mtp_layers
        self.model = model
        self.lm_head: Linear | None = None
        if not spec.tie_word_embeddings:
            self.lm_head = Linear(spec.hidden_size, spec.vocab_size, dtype, device)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_pages: Sequence[ops.KVPages],
        attn: ops.AttentionMetadata,
    ) -> torch.Tensor:
        """One pass over a batch of prefill chunks and decode rows.

        input_ids, positions: [T] int64. Returns [T, N] after the final norm; mutates kv_pages.
        """
        hidden_states: torch.Tensor = self.model(input_ids, positions, kv_pages, attn)
        return hidden_states

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[M, N] to [M, V] fp32: operands in the model's dtype, fp32 sums, never rounded after."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits: torch.Tensor = ops.linear(hidden_states, head.weight, torch.float32)
        return logits

    def mtp_forward(
        self,
        hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_pages: Sequence[ops.KVPages],
        attn: ops.AttentionMetadata,
        step: int = 0,
    ) -> torch.Tensor:
        """One multi-token-prediction step, for the slots i of a batch.

        hidden_states: [T, N], the trunk's output at position i, or the previous step's return
        value; next_token_ids: [T] int64, token i + 1; positions: [T] int64, i. Layers take turns
        when there are more steps than layers. Returns [T, N] for compute_logits, which then scores
        token i + 2; mutates the layer's own pages. Raises UnsupportedError without MTP layers.
        """
        if not self.num_mtp_layers:
            raise UnsupportedError(
                f"this {self.spec.model_type} model was built without an MTP layer; predicting "
                "several tokens at once needs a checkpoint that holds one."
            )
        index = step % self.num_mtp_layers
        pages = kv_pages[self.spec.num_hidden_layers + index]
        return self.model.mtp_forward(hidden_states, next_token_ids, positions, pages, attn, index)
