"""A model whose logits are a hash of the token history it finds in the KV pages.

A wrong slot, page, position or length changes the history and so every token after it, or trips an
assertion. The same logits follow from a token list alone, so tests know what to expect.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

import moestro.backends.cpu  # noqa: F401 -- registers the bodies
from moestro import ops
from moestro.core.model_spec import ModelSpec, RopeSpec
from moestro.runner.kv_pool import KVPool
from moestro.runner.model_runner import ModelRunner

VOCAB = 61
POISON = 60
"""A history with this token gives NaN logits."""
_PRIME = 1_000_003


def history_spec(vocab_size: int = VOCAB) -> ModelSpec:
    """Two layers of one kv head; D = 2 holds (token id, position)."""
    return ModelSpec(
        model_type="history",
        vocab_size=vocab_size,
        hidden_size=1,
        intermediate_size=1,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
        moe=None,
        moe_layers=(False, False),
        num_mtp_layers=0,
        rms_norm_eps=1e-6,
        rope=RopeSpec(theta=1e4),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="float32",
        eos_token_ids=(),
    )


def history_runner(
    *, num_pages: int = 64, page_size: int = 4, max_num_seqs: int = 8, **options: Any
) -> ModelRunner:
    pool = KVPool(history_spec(), num_pages, page_size, torch.float64)
    for pages in pool.layers:
        pages.k.fill_(-1)
    return ModelRunner(
        HistoryModel(),  # type: ignore[arg-type]
        pool,
        max_num_seqs=max_num_seqs,
        max_model_len=128,
        **options,
    )


def expected_logits(token_ids: Sequence[int], vocab_size: int = VOCAB) -> np.ndarray:
    """fp32 logits [V] after these tokens."""
    return _logits(torch.tensor([[_hashes(torch.tensor(token_ids))[-1]]]), vocab_size)[0].numpy()


class HistoryModel(nn.Module):
    """Takes CausalLM's place."""

    def __init__(self, vocab_size: int = VOCAB) -> None:
        super().__init__()
        self.spec = history_spec(vocab_size)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_pages: Sequence[ops.KVPages],
        attn: ops.AttentionMetadata,
    ) -> torch.Tensor:
        assert input_ids.dtype == positions.dtype == attn.slot_mapping.dtype == torch.int64
        assert attn.seq_lens.dtype == attn.query_start_loc.dtype == torch.int32
        assert attn.page_table.dtype == torch.int32
        assert attn.page_table.is_contiguous()
        assert len(set(attn.slot_mapping.tolist())) == len(input_ids)
        entries = torch.stack((input_ids, positions), dim=1).double()[:, None]
        for pages in kv_pages:
            ops.store_kv.reference(entries, -entries, pages, attn.slot_mapping)
        return torch.cat(
            [self._read(kv_pages, positions, attn, s) for s in range(len(attn.seq_lens))]
        )

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _logits(hidden_states, self.spec.vocab_size)

    def _read(
        self,
        kv_pages: Sequence[ops.KVPages],
        positions: torch.Tensor,
        attn: ops.AttentionMetadata,
        s: int,
    ) -> torch.Tensor:
        """[queries of s, 1] hashes of the history each query sees."""
        seq_len = int(attn.seq_lens[s])
        begin, end = attn.query_start_loc[s : s + 2].tolist()
        assert attn.max_seq_len >= seq_len
        assert attn.max_query_len >= end - begin > 0
        assert positions[begin:end].tolist() == list(range(seq_len - (end - begin), seq_len))
        page_size = kv_pages[0].page_size
        used = attn.page_table[s, : -(-seq_len // page_size)].long()
        assert not attn.page_table[s, len(used) :].any() or attn.max_seq_len > seq_len
        first, last = (p.k[used].reshape(-1, 2)[:seq_len] for p in (kv_pages[0], kv_pages[-1]))
        assert torch.equal(first, last)
        assert first[:, 1].tolist() == list(range(seq_len)), "a slot holds another position"
        return _hashes(first[:, 0].long())[-(end - begin) :, None]


def _hashes(token_ids: torch.Tensor) -> torch.Tensor:
    """[L] int64, of every prefix; -1 once POISON has been seen."""
    powers, power = [], 1
    for _ in range(len(token_ids)):
        power = power * 31 % _PRIME
        powers.append(power)
    hashes = ((token_ids + 1) * torch.tensor(powers)).cumsum(0) % _PRIME
    return torch.where((token_ids == POISON).cumsum(0) > 0, -1, hashes)


def _logits(hashes: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[M, 1] int64 to [M, V] fp32 in [-6, 6), all but the same for no two histories."""
    ids = torch.arange(vocab_size)
    mixed = hashes * (ids + 7) % _PRIME
    mixed = (mixed * mixed + 31 * ids) % _PRIME
    logits = (mixed.double() / _PRIME * 12 - 6).float()
    return logits.masked_fill(hashes < 0, float("nan"))
