"""Causal grouped-query attention over paged KV: prefill chunks, decode rows and any mixture."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moestro.ops.kv_pages import KVPages
from moestro.ops.registry import op
from moestro.ops.testing import Case


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where each sequence of a batch lies. Built once a step, shared by all layers.

    query_start_loc: [S + 1] int32, tokens of sequence s are rows [loc[s], loc[s + 1]).
    seq_lens: [S] int32, length of each sequence after this step; its queries are its last tokens.
    page_table: [S, M] int32, page ids in order, padded with 0.
    slot_mapping: [T] int64, where this step's keys and values go (see store_kv).
    max_query_len, max_seq_len: maxima over the batch.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int


def _cases() -> Iterator[Case]:
    yield from ()


@op(cases=_cases)
def paged_attention(
    q: torch.Tensor, pages: KVPages, metadata: AttentionMetadata, scale: float
) -> torch.Tensor:
    """softmax(scale * q k^T, causal) v for every query over its own sequence's pages.

    q: [T, H, D]; query head h reads kv head h // (H / G). The query at absolute position p
    attends to positions 0..p, this step's own keys included (they are already stored).
    Returns [T, H, D] in q's dtype. Scores, softmax and accumulation in fp32.
    """
    out = torch.empty_like(q)
    kv_heads = pages.k.shape[1]
    group = q.shape[1] // kv_heads
    starts = metadata.query_start_loc.tolist()
    for s, seq_len in enumerate(metadata.seq_lens.tolist()):
        begin, end = starts[s], starts[s + 1]
        if begin == end:
            continue
        used = metadata.page_table[s, : -(-seq_len // pages.page_size)].long()
        k, v = (
            t[used].transpose(0, 1).reshape(kv_heads, -1, q.shape[2])[:, :seq_len].float()
            for t in (pages.k, pages.v)
        )  # [G, seq_len, D]
        queries = q[begin:end].float().view(end - begin, kv_heads, group, -1)
        scores = torch.einsum("tgjd,gsd->gjts", queries, k) * scale
        position = torch.arange(seq_len - (end - begin), seq_len, device=q.device)
        hidden = torch.arange(seq_len, device=q.device)[None, :] > position[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[begin:end] = torch.einsum("gjts,gsd->tgjd", weights, v).flatten(1, 2).to(q.dtype)
    return out
