"""Paged attention and its task map on the native library."""

import torch

from moestro import ops
from moestro.backends.cpu.arguments import DTYPE_CODES, AttentionArgs, PlanArgs
from moestro.backends.cpu.buffers import new_empty
from moestro.backends.cpu.kv_pages import is_pool, pages_args, pages_tensors
from moestro.backends.cpu.launch import Kernel, launch
from moestro.backends.cpu.library import native
from moestro.ops.attention_plan import PlanShape
from moestro.ops.registry import implements

_ATTENTION_PLAN = Kernel("attention_plan")
_PAGED_ATTENTION = Kernel("paged_attention")
_MAX_GROUP = 64


def _fits(
    q: torch.Tensor, pages: ops.KVPages, metadata: ops.AttentionMetadata, scale: float
) -> bool:
    if not (q.dtype in DTYPE_CODES and q.dim() == 3 and is_pool(pages)):
        return False
    kv_heads = pages.k.shape[1]
    seqs = metadata.seq_lens.shape[0]
    return (
        q.shape[2] == pages.k.shape[3] > 0
        and kv_heads > 0
        and q.shape[1] % kv_heads == 0
        and q.shape[1] <= _MAX_GROUP * kv_heads
        and metadata.query_start_loc.shape == (seqs + 1,)
        and metadata.page_table.dim() == 2
        and metadata.page_table.shape[0] == seqs
        and metadata.query_start_loc.dtype == torch.int32
        and metadata.seq_lens.dtype == torch.int32
        and metadata.page_table.dtype == torch.int32
        and (metadata.plan is None or metadata.plan.dtype == torch.int32)
    )


@implements(ops.paged_attention, devices=("cpu",), when=_fits, invariant=True)
def paged_attention(
    q: torch.Tensor, pages: ops.KVPages, metadata: ops.AttentionMetadata, scale: float
) -> torch.Tensor:
    q = q.contiguous()
    out = new_empty(tuple(q.shape), q.dtype)
    starts = metadata.query_start_loc.contiguous()
    lengths = metadata.seq_lens.contiguous()
    table = metadata.page_table
    if table.stride(1) != 1:
        table = table.contiguous()
    tokens, heads, dim = q.shape
    plan = metadata.plan
    arguments = AttentionArgs(
        q.data_ptr(),
        out.data_ptr(),
        starts.data_ptr(),
        lengths.data_ptr(),
        table.data_ptr(),
        None if plan is None else plan.data_ptr(),
        pages_args(pages),
        table.stride(0),
        table.shape[1],
        tokens,
        lengths.shape[0],
        heads,
        pages.k.shape[1],
        dim,
        0 if plan is None else plan.shape[0],
        DTYPE_CODES[q.dtype],
        scale,
    )
    held = (q, out, starts, lengths, table, *pages_tensors(pages))
    launch(_PAGED_ATTENTION, arguments, *held, *(() if plan is None else (plan,)))
    return out


def _plans(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    pages: ops.KVPages,
    num_heads: int,
    num_tokens: int,
    num_parts: int,
) -> bool:
    kv_heads = pages.num_kv_heads
    seqs = seq_lens.shape[0]
    return (
        is_pool(pages)
        and kv_heads > 0
        and num_heads % kv_heads == 0
        and num_heads <= _MAX_GROUP * kv_heads
        and query_start_loc.shape == (seqs + 1,)
        and page_table.dim() == 2
        and page_table.shape[0] == seqs
        and query_start_loc.dtype == seq_lens.dtype == page_table.dtype == torch.int32
    )


@implements(ops.attention_plan, devices=("cpu",), when=_plans, invariant=True)
def attention_plan(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    pages: ops.KVPages,
    num_heads: int,
    num_tokens: int,
    num_parts: int,
) -> torch.Tensor:
    starts, lengths = query_start_loc.contiguous(), seq_lens.contiguous()
    table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    seqs, kv_heads, dim = lengths.shape[0], pages.num_kv_heads, pages.head_dim
    row_bytes = 2 * dim * pages.k.itemsize + (8 if pages.k_scales is not None else 0)
    parts = num_parts or native().num_threads()
    shape = PlanShape(num_heads, kv_heads, dim, row_bytes, parts)
    plan = new_empty((shape.capacity(seqs, num_tokens),), torch.int32)
    arguments = PlanArgs(
        starts.data_ptr(),
        lengths.data_ptr(),
        table.data_ptr(),
        plan.data_ptr(),
        plan.shape[0],
        table.stride(0),
        table.shape[1],
        num_tokens,
        seqs,
        num_heads,
        kv_heads,
        dim,
        row_bytes,
        pages.k.shape[0],
        pages.page_size,
        parts,
    )
    launch(_ATTENTION_PLAN, arguments, starts, lengths, table, plan)
    return plan
