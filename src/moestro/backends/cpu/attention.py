"""Paged attention on the native library."""

import torch

from moestro import ops
from moestro.backends.cpu.arguments import DTYPE_CODES, AttentionArgs
from moestro.backends.cpu.buffers import new_empty
from moestro.backends.cpu.kv_pages import is_pool, pages_args, pages_tensors
from moestro.backends.cpu.launch import Kernel, launch
from moestro.ops.registry import implements

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
    arguments = AttentionArgs(
        q.data_ptr(),
        out.data_ptr(),
        starts.data_ptr(),
        lengths.data_ptr(),
        table.data_ptr(),
        pages_args(pages),
        table.stride(0),
        table.shape[1],
        tokens,
        lengths.shape[0],
        heads,
        pages.k.shape[1],
        dim,
        DTYPE_CODES[q.dtype],
        scale,
    )
    launch(_PAGED_ATTENTION, arguments, q, out, starts, lengths, table, *pages_tensors(pages))
    return out
