"""Causal grouped-query attention over paged KV: prefill chunks, decode rows and any mixture."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from moestro.ops.attention_plan import PlanShape, make_plan
from moestro.ops.kv_pages import QUANTIZED_DTYPES, KVPages
from moestro.ops.registry import op
from moestro.ops.testing import FLOAT_DTYPES, Arguments, Case, normal
from moestro.quant.kv import quantize_rows


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where each sequence of a batch lies. Built once a step, shared by all layers.

    query_start_loc: [S + 1] int32, tokens of sequence s are rows [loc[s], loc[s + 1]).
    seq_lens: [S] int32, length of each sequence after this step; its queries are its last tokens.
    page_table: [S, M] int32, page ids in order, padded with 0.
    slot_mapping: [T] int64, where this step's keys and values go (see store_kv).
    max_query_len, max_seq_len: maxima over the batch.
    plan: of attention_plan for this batch; without one each call of paged_attention makes its own.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
    plan: torch.Tensor | None = None

    def planned(self, pages: KVPages, num_heads: int) -> "AttentionMetadata":
        """With the task map for layers that are like `pages`; itself where it has one."""
        if self.plan is not None:
            return self
        tokens = self.slot_mapping.shape[0]
        plan = attention_plan(
            self.query_start_loc, self.seq_lens, self.page_table, pages, num_heads, tokens, 0
        )
        return replace(self, plan=plan)


@dataclass(frozen=True, slots=True)
class _Batch:
    """A case's shapes. sequences: (tokens already in pages, query tokens) each."""

    sequences: tuple[tuple[int, int], ...]
    page_size: int = 16
    heads: tuple[int, int, int] = (4, 2, 16)
    """H, G, D"""
    sharpness: float = 1.0
    """scale of the queries"""


_BATCHES = {
    "no sequence": _Batch(()),
    "no token": _Batch(((5, 0), (3, 0))),
    "first token": _Batch(((0, 1),), page_size=1),
    "decode": _Batch(((1, 1), (14, 1), (15, 1), (16, 1), (100, 1))),
    "decode, 16 heads to one": _Batch(((7, 1), (129, 1)), 64, (16, 1, 64)),
    "prefill": _Batch(((0, 1), (0, 7), (0, 33)), 7, (6, 2, 24)),
    "prefill, one head to one": _Batch(((0, 20), (0, 16)), 16, (3, 3, 8)),
    "later chunks": _Batch(((63, 5), (64, 17), (1, 40)), 64, (8, 1, 128)),
    "mixed": _Batch(((20, 1), (0, 17), (63, 5), (9, 0), (64, 1), (0, 64)), 64, (4, 4, 40)),
    "pages of one token": _Batch(((3, 1), (0, 9), (30, 4)), 1, (5, 5, 32)),
    "long": _Batch(((900, 1), (600, 3), (0, 300)), 64, (4, 1, 32)),
    "sharp": _Batch(((90, 1), (40, 8)), sharpness=6.0),
}


def _cases() -> Iterator[Case]:
    for dtype in FLOAT_DTYPES:
        for name, batch in _BATCHES.items():
            yield Case(name, dtype, partial(_draw, batch, dtype, dtype))
    for page_dtype in (torch.bfloat16, torch.float16):
        make = partial(_draw, _BATCHES["mixed"], torch.float32, page_dtype)
        yield Case(f"fp32 over {page_dtype} pages", torch.float32, make)
    for page_dtype in QUANTIZED_DTYPES:
        for dtype in FLOAT_DTYPES:
            for name, batch in _BATCHES.items():
                make = partial(_draw, batch, dtype, page_dtype)
                yield Case(f"{name}, {page_dtype} pages", dtype, make)


def _draw(
    batch: _Batch, dtype: torch.dtype, page_dtype: torch.dtype, generator: torch.Generator
) -> Arguments:
    """Pages in no order, NaN wherever no sequence has a token, padded page table."""
    codes = page_dtype if page_dtype in QUANTIZED_DTYPES else None
    heads, kv_heads, dim = batch.heads
    lengths = [context + query for context, query in batch.sequences]
    queries = [query for _, query in batch.sequences]
    counts = [-(-length // batch.page_size) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=generator).int()
    page_table = torch.zeros((len(lengths), max(counts, default=0) + 1), dtype=torch.int32)
    shape = (len(order), kv_heads, batch.page_size, dim)
    held = torch.float32 if codes else page_dtype
    k, v = (torch.full(shape, torch.nan, dtype=held) for _ in "kv")
    taken = 0
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        page_table[s, :count] = order[taken : taken + count]
        taken += count
        slot = torch.arange(length)
        page = page_table[s, slot // batch.page_size].long()
        for pool in (k, v):
            values = normal(generator, length, kv_heads, dim, dtype=held)
            pool[page, :, slot % batch.page_size] = values
    pages = KVPages(k, v)
    if codes:
        (k, k_scales), (v, v_scales) = (quantize_rows(t, codes) for t in (k, v))
        pages = KVPages(k, v, k_scales, v_scales)
    tokens = sum(queries)
    ends = torch.tensor([0, *queries]).cumsum(0)
    return {
        "q": normal(generator, tokens, heads, dim, dtype=dtype, scale=batch.sharpness),
        "pages": pages,
        "metadata": AttentionMetadata(
            query_start_loc=ends.int(),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            page_table=page_table,
            slot_mapping=torch.full((tokens,), -1),
            max_query_len=max(queries, default=0),
            max_seq_len=max(lengths, default=0),
        ),
        "scale": dim**-0.5,
    }


# A probability rounded to bf16 is off by up to 2^-9 of itself, which shows where rows see a few
# positions and others many; the mean error stays below that of a result rounded twice.
@op(cases=_cases, tol={torch.bfloat16: (2.0**-7, 2.0**-5)})
def paged_attention(
    q: torch.Tensor, pages: KVPages, metadata: AttentionMetadata, scale: float
) -> torch.Tensor:
    """softmax(scale * q k^T, causal) v for every query over its own sequence's pages.

    q: [T, H, D]; query head h reads kv head h // (H / G). The query at absolute position p
    attends to positions 0..p, this step's own keys included (they are already stored).
    Returns [T, H, D] in q's dtype. Sources: Ainslie et al. 2023 (grouped queries),
    https://arxiv.org/abs/2305.13245; Kwon et al. 2023 (pages), https://arxiv.org/abs/2309.06180.

    Scores, their maxima and sums and the accumulation are fp32 here and in every body. What a body
    may do: sum in another order, and with bf16 queries give the value product each probability
    (times the value's scale, where pages hold codes) as one bf16 number or a sum of two, because
    the instructions that are fast multiply bf16 only. Either way the result stays within the
    op's tolerance. metadata.plan changes nothing of it.
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
            t.transpose(0, 1).reshape(kv_heads, -1, q.shape[2])[:, :seq_len]
            for t in pages.values(used)
        )  # [G, seq_len, D]
        queries = q[begin:end].float().view(end - begin, kv_heads, group, -1)
        scores = torch.einsum("tgjd,gsd->gjts", queries, k) * scale
        position = torch.arange(seq_len - (end - begin), seq_len, device=q.device)
        hidden = torch.arange(seq_len, device=q.device)[None, :] > position[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[begin:end] = torch.einsum("gjts,gsd->tgjd", weights, v).flatten(1, 2).to(q.dtype)
    return out


_PLAN_BATCHES: dict[str, tuple[tuple[tuple[int, int], ...], tuple[int, int], int]] = {
    "no sequence": ((), (4, 2), 2),
    "no token": (((5, 0), (3, 0)), (4, 2), 2),
    "one part": (((5, 1), (8000, 1)), (4, 2), 1),
    "even": (((1023, 1),) * 16, (8, 1), 2),
    "one long": (((32767, 1), *((1023, 1),) * 15), (8, 1), 2),
    "alone": (((16383, 1),), (16, 1), 3),
    "prefill": (((0, 700), (0, 33)), (6, 2), 4),
    "mixed": (((20000, 1), (0, 700), (5000, 5), (9, 0), (64, 1)), (64, 8), 5),
}
"""Sequences (context, queries), heads and kv heads, parts."""


def _plan_cases() -> Iterator[Case]:
    for name, (sequences, heads, parts) in _PLAN_BATCHES.items():
        for page_dtype in (torch.bfloat16, torch.int8):
            make = partial(_draw_plan, sequences, heads, parts, page_dtype)
            yield Case(f"{name}, {page_dtype}", torch.int32, make)


def _draw_plan(
    sequences: tuple[tuple[int, int], ...],
    heads: tuple[int, int],
    parts: int,
    page_dtype: torch.dtype,
    generator: torch.Generator,
) -> Arguments:
    lengths = [context + query for context, query in sequences]
    width = -(-max(lengths, default=0) // 64)
    k, v = torch.zeros((2, 7, heads[1], 64, 32)).to(page_dtype)
    scales = (k[..., 0].float(), v[..., 0].float()) if page_dtype == torch.int8 else (None, None)
    pages = KVPages(k, v, *scales)
    queries = torch.tensor([0, *(query for _, query in sequences)])
    return {
        "query_start_loc": queries.cumsum(0).int(),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "page_table": torch.randint(7, (len(lengths), width), generator=generator).int(),
        "pages": pages,
        "num_heads": heads[0],
        "num_tokens": int(queries.sum()),
        "num_parts": parts,
    }


@op(cases=_plan_cases)
def attention_plan(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,  # noqa: ARG001 -- bodies check it
    pages: KVPages,
    num_heads: int,
    num_tokens: int,
    num_parts: int,
) -> torch.Tensor:
    """The task map of one step's attention, for all its layers; see ops/attention_plan.py.

    query_start_loc, seq_lens, page_table: as in AttentionMetadata; pages: of any of the layers;
    num_tokens: T; num_parts: threads that share the work, 0 for those the device has. Returns int32
    [capacity], which depends on sizes but not on lengths: the header and tasks of
    AttentionPlan.words, then zeros. Bodies refuse a page table that names no pages here, before
    any layer runs. Source: in the manner of the task maps of Tencent's hpc-ops,
    https://github.com/Tencent/hpc-ops, with other costs and cuts.
    """
    row_bytes = 2 * pages.head_dim * pages.k.itemsize + (8 if pages.k_scales is not None else 0)
    shape = PlanShape(num_heads, pages.num_kv_heads, pages.head_dim, row_bytes, max(1, num_parts))
    lengths: list[int] = seq_lens.tolist()
    words = make_plan(query_start_loc.tolist(), lengths, shape).words(
        shape, len(lengths), num_tokens
    )
    plan = torch.zeros(shape.capacity(len(lengths), num_tokens), dtype=torch.int32)
    plan[: len(words)] = torch.tensor(words, dtype=torch.int32)
    return plan
