"""Attention over pages: single lengths, mixes of lengths, and the element-wise chain before it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812

from moestro import ops
from moestro.cli.bench.works.matmul import SHAPES, Shape
from moestro.cli.bench.works.work import COLD_BYTES, Call, Work, normal
from moestro.ops.attention_plan import PlanShape, cut_units, find_units
from moestro.quant.kv import KV_DTYPES, LARGEST_CODE, quantize_rows

PAGE, DIM = 64, 128
CUTS = {"whole": 2**30, "cut every 8K": 16, "cut every 2K": 4, "cut every 512": 1}
"""Fixed splits of a sequence's positions, in super-tiles."""
BATCHES: dict[str, tuple[tuple[int, int], ...]] = {
    "decode 1 x 512": ((1, 512),),
    "decode 1 x 4K": ((1, 4096),),
    "decode 1 x 32K": ((1, 32768),),
    "decode 16 x 2K": ((1, 2048),) * 16,
    "decode 1 x 32K + 15 x 1K": ((1, 32768), *((1, 1024),) * 15),
    "decode 1 x 16K + 8 x 512": ((1, 16384), *((1, 512),) * 8),
    "prefill 512": ((512, 512),),
    "prefill 2K": ((2048, 2048),),
    "prefill 512 of 16K": ((512, 16384),),
    "prefill 8 x 512 + 512 of 16K": (*((512, 512),) * 8, (512, 16384)),
    "prefill 8 x 512 + decode 1 x 16K": (*((512, 512),) * 8, (1, 16384)),
}
"""(queries, length) of each sequence; the queries are a sequence's last tokens."""
ONE_KV_HEAD = replace(SHAPES["hy3"], name="hy3 TP8", heads=8, kv_heads=1)
"""A rank's share of Hy3: no other heads' tasks fill the threads beside a long sequence."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Pages of one layer, what the step asks of them, and the same without pages for torch."""

    q: torch.Tensor
    pages: ops.KVPages
    metadata: ops.AttentionMetadata
    plain: tuple[tuple[torch.Tensor, torch.Tensor], ...]


def attention(shapes: list[str], kinds: list[str]) -> Iterator[Work]:
    """Every batch on the heads of each model, mixes of lengths on a rank's share of Hy3 too.

    kinds: how keys and values are kept, keys of KV_DTYPES; torch has them in bf16.
    """
    for kind in kinds:
        for name in shapes:
            for title, sequences in BATCHES.items():
                yield _attention(SHAPES[name], title, sequences, kind)
                if name == "hy3" and len(set(sequences)) > 1:
                    yield _attention(ONE_KV_HEAD, title, sequences, kind)


def _attention(shape: Shape, title: str, sequences: tuple[tuple[int, int], ...], kind: str) -> Work:
    tokens = sum(length for _, length in sequences)
    size = float(tokens * shape.kv_heads * _row_bytes(KV_DTYPES[kind]))
    copies = max(2, min(16, int(COLD_BYTES // size)))
    batches = [make_batch(shape, sequences, kind) for _ in range(copies)]
    seen = sum(q * (n - q) + q * (q + 1) // 2 for q, n in sequences)
    return Work(
        "attention",
        f"{shape.name} {title}{_suffix(kind)}",
        _ours(batches),
        {**other_cuts(batches, shape, sequences), "SDPA a sequence": _sdpa(batches, sequences)},
        size,
        4.0 * seen * shape.heads * DIM,
    )


def _suffix(kind: str) -> str:
    return "" if kind == "bfloat16" else f", {kind} KV"


def _row_bytes(dtype: torch.dtype) -> int:
    """Bytes of a position's key and value of one kv head, scales included."""
    return 2 * DIM * dtype.itemsize + 8 * (dtype in LARGEST_CODE)


def _pages(k: torch.Tensor, v: torch.Tensor, kind: str) -> ops.KVPages:
    dtype = KV_DTYPES[kind]
    if dtype not in LARGEST_CODE:
        return ops.KVPages(k.to(dtype), v.to(dtype))
    (k, k_scales), (v, v_scales) = (quantize_rows(t, dtype) for t in (k, v))
    return ops.KVPages(k, v, k_scales, v_scales)


def make_batch(
    shape: Shape, sequences: tuple[tuple[int, int], ...], kind: str = "bfloat16"
) -> Batch:
    """Random pages, each sequence's own in a row, and the task map that all layers share."""
    counts = [-(-n // PAGE) for _, n in sequences]
    k, v = (normal(sum(counts), shape.kv_heads, PAGE, DIM) for _ in range(2))
    queries = [q for q, _ in sequences]
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    table = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    plain, at = [], 0
    for row, (count, (_, length)) in enumerate(zip(counts, sequences, strict=True)):
        table[row, :count] = torch.arange(at, at + count)
        own = (t[at : at + count].transpose(0, 1).flatten(1, 2)[None, :, :length] for t in (k, v))
        plain.append(tuple(own))
        at += count
    total = sum(queries)
    metadata = ops.AttentionMetadata(
        starts,
        torch.tensor([n for _, n in sequences], dtype=torch.int32),
        table,
        torch.zeros(total, dtype=torch.int64),
        max(queries),
        max(n for _, n in sequences),
    )
    q, pages = normal(total, shape.heads, DIM), _pages(k, v, kind)
    planned = metadata.planned(pages, shape.heads)
    return Batch(q, pages, planned, tuple(plain))  # type: ignore[arg-type]


def _ours(batches: list[Batch]) -> Call:
    def call(i: int) -> object:
        b = batches[i % len(batches)]
        return ops.paged_attention(b.q, b.pages, b.metadata, DIM**-0.5)

    return call


def other_cuts(
    batches: list[Batch], shape: Shape, sequences: tuple[tuple[int, int], ...]
) -> dict[str, Call]:
    """The same kernel with task maps that look at no cost: each block of queries whole, or every
    so many super-tiles. One-sequence batches would only repeat what another row says."""
    if len(sequences) == 1 and sequences[0][0] > 1:
        return {}
    row_bytes = _row_bytes(batches[0].pages.k.dtype)
    size = PlanShape(shape.heads, shape.kv_heads, DIM, row_bytes, torch.get_num_threads())
    starts, lengths = (
        t.tolist() for t in (batches[0].metadata.query_start_loc, batches[0].metadata.seq_lens)
    )
    units = find_units(starts, lengths, size)
    calls = {}
    for name, supers in CUTS.items():
        steps = [min(unit.num_supers, supers) for unit in units]
        words = cut_units(units, steps, size).words(size, len(lengths), len(batches[0].q))
        plan = torch.tensor(words, dtype=torch.int32)
        calls[name] = _ours([replace(b, metadata=replace(b.metadata, plan=plan)) for b in batches])
    return calls


def _sdpa(batches: list[Batch], sequences: tuple[tuple[int, int], ...]) -> Call:
    """One scaled_dot_product_attention a sequence over contiguous keys: no pages to walk."""
    masks = {
        (q, n): torch.ones(q, n, dtype=torch.bool).tril(n - q) for q, n in sequences if 1 < q < n
    }

    def call(i: int) -> None:
        b, at = batches[i % len(batches)], 0
        for (q, n), (k, v) in zip(sequences, b.plain, strict=True):
            F.scaled_dot_product_attention(
                b.q[at : at + q].transpose(0, 1)[None],
                k,
                v,
                attn_mask=masks.get((q, n)),
                is_causal=q == n > 1,
                enable_gqa=True,
            )
            at += q

    return call


def chain(shapes: list[str], kinds: list[str]) -> Iterator[Work]:
    """Norm of q and k heads, rotation, and the store: ours beside plain torch operations."""
    for kind in kinds:
        for name in shapes:
            for tokens in (1, 8, 32, 512, 2048):
                yield _chain(SHAPES[name], tokens, kind)


def _chain(shape: Shape, tokens: int, kind: str) -> Work:
    heads, kv_heads = shape.heads, shape.kv_heads
    width = (heads + 2 * kv_heads) * DIM
    qkv, weight = normal(tokens, width), torch.ones(DIM, dtype=torch.bfloat16)
    num_pages = -(-tokens // PAGE)
    empty = torch.zeros(num_pages, kv_heads, PAGE, DIM)
    pages, theirs = (_pages(empty, empty, kind) for _ in range(2))
    slots = torch.arange(tokens)
    angles = torch.rand(tokens, DIM // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)

    rotary = ops.Rotary(cos_sin, torch.arange(tokens))

    def ours(_: int) -> None:
        ops.qk_norm_rope_store(qkv, weight, weight, rotary, 1e-6, pages, slots)

    def unfused(_: int) -> None:
        q, k, v = qkv.view(tokens, -1, DIM).split((heads, kv_heads, kv_heads), dim=1)
        cos, sin = (t[:, None].repeat(1, 1, 2) for t in cos_sin[rotary.positions].chunk(2, dim=-1))
        q, k = (_turned(t, weight, cos, sin) for t in (q, k))
        _stored(k, theirs.k, theirs.k_scales, slots)
        _stored(v, theirs.v, theirs.v_scales, slots)

    written = 2.0 * heads * DIM + kv_heads * _row_bytes(KV_DTYPES[kind])
    size = tokens * (2.0 * width + written + 4.0 * DIM)
    name = f"{shape.name} {tokens} tokens{_suffix(kind)}"
    return Work("chain", name, ours, {"unfused torch": unfused}, size, 0.0, "fp32")


def _turned(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Norm and rotation as models without fused ops write them."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    y = weight * wide.to(x.dtype)
    half = torch.cat((-y[..., DIM // 2 :], y[..., : DIM // 2]), dim=-1)
    return (y * cos + half * sin).to(x.dtype)


def _stored(
    x: torch.Tensor, held: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor
) -> None:
    """The store, quantising where the pages hold codes, an operation at a time."""
    page, slot = slots // PAGE, slots % PAGE
    if scales is None:
        held[page, :, slot] = x
        return
    scale = x.float().abs().amax(-1) / LARGEST_CODE[held.dtype]
    codes = x.float() / scale[..., None]
    if held.dtype == torch.int8:
        codes = codes.round()
    # torch has no indexed assignment for float8
    held.view(torch.uint8)[page, :, slot] = codes.to(held.dtype).view(torch.uint8)
    scales[page, :, slot] = scale
