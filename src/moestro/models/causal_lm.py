"""CausalLM: what the runner and the weight loader see of any model."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from moestro import ops
from moestro.core.model_spec import ModelSpec
from moestro.core.weight_format import HEAD
from moestro.errors import UnsupportedError
from moestro.layers.embedding import Embedding
from moestro.layers.parameters import Parameter, Parameters
from moestro.layers.rotary import RotaryTable
from moestro.quant.format import WeightTensor, float_weight


class Trunk(nn.Module):
    """Everything below the head; one class a model family."""

    embed_tokens: Embedding
    rotary: RotaryTable

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

    def mtp_store(
        self,
        hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        rotary: ops.Rotary,
        pages: ops.KVPages,
        slot_mapping: torch.Tensor,
        index: int,
    ) -> None:
        """Only what mtp_forward keeps of these slots; see CausalLM.mtp_store."""
        raise NotImplementedError


class CausalLM(nn.Module):
    """A decoder-only language model over paged KV: a trunk and a head.

    Layer i reads and writes kv_pages[i]; MTP layer j kv_pages[spec.num_hidden_layers + j].
    weights: every parameter by name, for the loader. lm_head: the head's weight; tied to the
    embedding it shares the table's memory where it can: unpacked and in the table's own type.
    """

    def __init__(
        self, parameters: Parameters, spec: ModelSpec, model: Trunk, num_mtp_layers: int
    ) -> None:
        super().__init__()
        self.spec = spec
        self.num_mtp_layers = num_mtp_layers
        self.model = model
        self.lm_head = _head(parameters, spec, model.embed_tokens.weight)
        self.weights: Mapping[str, Parameter] = parameters.by_name

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

    def reserve_positions(self, max_model_len: int) -> None:
        """Set the rotary table's memory aside once: its address then stays."""
        self.model.rotary.reserve(max_model_len)

    def prepare_positions(self, max_seq_len: int) -> None:
        """Have the rotary rows of positions below max_seq_len ready, as forward does itself."""
        self.model.rotary.up_to(max_seq_len)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[M, N] to [M, V] fp32: operands in the model's dtype, fp32 sums, never rounded after."""
        logits: torch.Tensor = ops.linear(hidden_states, self.lm_head, torch.float32)
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

    def mtp_store(
        self,
        hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_pages: Sequence[ops.KVPages],
        slot_mapping: torch.Tensor,
        max_seq_len: int,
        step: int = 0,
    ) -> None:
        """Write the KV that mtp_forward would write for the slots i, the same bits, and no more.

        It costs eh_proj and qkv_proj: no attention, no experts. slot_mapping: [T] int64;
        max_seq_len: above all positions; the rest as in mtp_forward. Mutates the layer's pages.
        """
        index = step % self.num_mtp_layers
        pages = kv_pages[self.spec.num_hidden_layers + index]
        rotary = ops.Rotary(self.model.rotary.up_to(max_seq_len), positions)
        self.model.mtp_store(hidden_states, next_token_ids, rotary, pages, slot_mapping, index)


def _head(parameters: Parameters, spec: ModelSpec, table: torch.Tensor) -> WeightTensor:
    shared = float_weight(table)
    wanted = parameters.formats.of(HEAD)
    if spec.tie_word_embeddings and not parameters.packs and wanted == shared.format:
        return shared
    return parameters.weight(HEAD, spec.vocab_size, spec.hidden_size)
