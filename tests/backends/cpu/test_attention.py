"""store_kv and paged attention: against float64, and the same bits however work is cut."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from tests.backends.cpu.levels import (
    DTYPES,
    LEVELS,
    assert_close,
    at_level,
    draw,
    same_bits,
    single_threaded,
)

from moestro import ops
from moestro.errors import UnsupportedError


@pytest.fixture(params=LEVELS, autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from at_level(request)


@dataclass
class Stream:
    """One sequence's q, k, v ([L, heads, D]) and the pages it lives in."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pages: list[int]

    def slots(self, page_size: int) -> torch.Tensor:
        places = [
            self.pages[i // page_size] * page_size + i % page_size for i in range(len(self.k))
        ]
        return torch.tensor(places, dtype=torch.int64)


def _pool(
    num_pages: int, kv_heads: int, page_size: int, dim: int, dtype: torch.dtype
) -> ops.KVPages:
    """Pages full of NaN: a slot that nobody stored must never count."""
    k, v = torch.full((2, num_pages, kv_heads, page_size, dim), float("nan")).to(dtype)
    return ops.KVPages(k, v)


def _streams(
    lengths: Sequence[int], pages: ops.KVPages, group: int, dtype: torch.dtype
) -> list[Stream]:
    num_pages, kv_heads, page_size, dim = pages.k.shape
    free = torch.randperm(num_pages).tolist()
    made = []
    for length in lengths:
        taken = [free.pop() for _ in range(-(-length // page_size))]
        stream = Stream(
            draw(length, kv_heads * group, dim, dtype=dtype),
            draw(length, kv_heads, dim, dtype=dtype),
            draw(length, kv_heads, dim, dtype=dtype),
            taken,
        )
        ops.store_kv(stream.k, stream.v, pages, stream.slots(page_size))
        made.append(stream)
    return made


def _attend(
    streams: Sequence[Stream], spans: Sequence[tuple[int, int]], pages: ops.KVPages
) -> list[torch.Tensor]:
    """One call over positions [start, stop) of each stream; the outputs of each."""
    counts = [stop - start for start, stop in spans]
    width = max(1, *(len(s.pages) for s in streams))
    table = torch.tensor([s.pages + [0] * (width - len(s.pages)) for s in streams])
    metadata = ops.AttentionMetadata(
        torch.tensor([0, *counts]).cumsum(0).int(),
        torch.tensor([stop for _, stop in spans], dtype=torch.int32),
        table.int(),
        torch.zeros(sum(counts), dtype=torch.int64),
        max(counts),
        max(stop for _, stop in spans),
    )
    q = torch.cat([s.q[start:stop] for s, (start, stop) in zip(streams, spans, strict=True)])
    out = ops.paged_attention(q, pages, metadata, q.shape[2] ** -0.5)
    return list(out.split(counts))


def _exact(stream: Stream, start: int = 0) -> torch.Tensor:
    """Outputs of the queries from position `start` on."""
    group = stream.q.shape[1] // stream.k.shape[1]
    q = stream.q[start:].double().transpose(0, 1)
    k, v = (
        t.double().repeat_interleave(group, dim=1).transpose(0, 1) for t in (stream.k, stream.v)
    )
    scores = q @ k.transpose(1, 2) * q.shape[2] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + start)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "page_size"),
    [(1, 1, 16, 16), (2, 4, 64, 64), (2, 3, 6, 1), (1, 16, 128, 48), (3, 8, 34, 7)],
)
def test_attention_is_right(
    dtype: torch.dtype, kv_heads: int, group: int, dim: int, page_size: int
) -> None:
    lengths = (1, 65, 3, 200)
    pages = _pool(300 // page_size + 8, kv_heads, page_size, dim, dtype)
    streams = _streams(lengths, pages, group, dtype)
    outputs = _attend(streams, [(0, n) for n in lengths], pages)
    for stream, out in zip(streams, outputs, strict=True):
        assert_close(out, _exact(stream), 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("group", "dim"), [(1, 64), (4, 128), (5, 18), (8, 128), (12, 64), (16, 32), (20, 64)]
)
def test_chunks_and_neighbours_do_not_change_bits(dtype: torch.dtype, group: int, dim: int) -> None:
    length, page_size = 1100, 16
    pages = _pool(160, 2, page_size, dim, dtype)
    one, other, third = _streams((length, 700, 77), pages, group, dtype)
    (whole,) = _attend([one], [(0, length)], pages)
    assert_close(whole, _exact(one), 8)
    assert same_bits(whole, single_threaded(lambda: _attend([one], [(0, length)], pages)[0]))
    cuts = [0, 1, 2, 17, 64, 511, 512, 513, 514, 900, length]
    for start, stop in pairwise(cuts):
        (alone,) = _attend([one], [(start, stop)], pages)
        assert same_bits(alone, whole[start:stop]), f"positions {start} to {stop} alone"
        _, among, _ = _attend([other, one, third], [(699, 700), (start, stop), (3, 77)], pages)
        assert same_bits(among, whole[start:stop]), f"positions {start} to {stop} in a batch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_of_a_long_context_is_the_same_on_one_thread_and_two(dtype: torch.dtype) -> None:
    length = 3000
    pages = _pool(48, 1, 64, 128, dtype)
    (stream,) = _streams((length,), pages, 8, dtype)
    spans = [(length - 1, length)]
    (split,) = _attend([stream], spans, pages)
    assert same_bits(split, single_threaded(lambda: _attend([stream], spans, pages)[0]))
    assert_close(split, _exact(stream, length - 1), 8)


def test_the_layout_of_pages_does_not_change_bits() -> None:
    small, large = _pool(80, 2, 16, 64, torch.bfloat16), _pool(20, 2, 64, 64, torch.bfloat16)
    (stream,) = _streams((600,), small, 4, torch.bfloat16)
    moved = Stream(stream.q, stream.k, stream.v, list(range(10)))
    ops.store_kv(moved.k, moved.v, large, moved.slots(64))
    (a,), (b,) = _attend([stream], [(0, 600)], small), _attend([moved], [(0, 600)], large)
    assert same_bits(a, b)


def test_strided_pools_are_taken() -> None:
    memory = torch.full((6, 2, 2, 16, 32), float("nan"))
    apart = ops.KVPages(memory[:, 0], memory[:, 1])  # k and v of a page beside each other
    dense = ops.KVPages(memory[:, 0].clone(), memory[:, 1].clone())
    (stream,) = _streams((70,), apart, 2, torch.float32)
    ops.store_kv(stream.k, stream.v, dense, stream.slots(16))
    (a,), (b,) = _attend([stream], [(0, 70)], apart), _attend([stream], [(0, 70)], dense)
    assert same_bits(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_dtype", DTYPES)
def test_store_kv_writes_its_slots_and_nothing_else(
    dtype: torch.dtype, page_dtype: torch.dtype
) -> None:
    pages = _pool(5, 3, 4, 18, page_dtype)
    k, v = draw(4, 3, 18, dtype=dtype), draw(4, 3, 18, dtype=dtype)
    slots = torch.tensor([19, -1, 0, 6])
    expected = ops.KVPages(pages.k.clone(), pages.v.clone())
    ops.store_kv.reference(k, v, expected, slots)
    ops.store_kv(k, v, pages, slots)
    assert same_bits(pages.k, expected.k)
    assert same_bits(pages.v, expected.v)


@pytest.mark.parametrize("bad", [-2, 20, 2**40])
def test_store_kv_refuses_slots_out_of_range(bad: int) -> None:
    pages = _pool(5, 1, 4, 8, torch.float32)
    with pytest.raises(ValueError, match=rf"slot_mapping\[1\] is {bad}"):
        ops.store_kv(draw(2, 1, 8), draw(2, 1, 8), pages, torch.tensor([0, bad]))


@pytest.mark.parametrize(
    ("starts", "lengths", "table", "message"),
    [
        ([0, 2], [5], [[7, 0]], r"page_table\[0, 0\] is 7"),
        ([0, 2], [5], [[0, -1]], r"page_table\[0, 1\] is -1"),
        ([0, 2], [9], [[0, 1]], "needs 3 pages; its table has 2"),
        ([0, 3], [5], [[0, 1]], "query_start_loc"),
        ([0, 2], [1], [[0, 1]], "2 queries but seq_len 1"),
        ([1, 0], [5], [[0, 1]], "query_start_loc"),
    ],
)
def test_attention_refuses_bad_metadata(
    starts: list[int], lengths: list[int], table: list[list[int]], message: str
) -> None:
    pages = _pool(7, 1, 4, 8, torch.float32)
    metadata = ops.AttentionMetadata(
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(table, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int64),
        2,
        max(lengths),
    )
    with pytest.raises(ValueError, match=message):
        ops.paged_attention(draw(2, 1, 8), pages, metadata, 1.0)


def test_a_plan_does_not_vouch_for_another_table_or_pool() -> None:
    pages = _pool(7, 1, 4, 8, torch.float32)
    metadata = ops.AttentionMetadata(
        torch.tensor([0, 2], dtype=torch.int32),
        torch.tensor([6], dtype=torch.int32),
        torch.tensor([[6, 2]], dtype=torch.int32),
        torch.zeros(2, dtype=torch.int64),
        2,
        6,
    ).planned(pages, 1)
    ops.paged_attention(draw(2, 1, 8), pages, metadata, 1.0)
    moved = replace(metadata, page_table=torch.tensor([[6, 7]], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"page_table\[0, 1\] is 7; pages are 0 to 6"):
        ops.paged_attention(draw(2, 1, 8), pages, moved, 1.0)
    with pytest.raises(ValueError, match=r"page_table\[0, 0\] is 6; pages are 0 to 2"):
        ops.paged_attention(draw(2, 1, 8), _pool(3, 1, 4, 8, torch.float32), metadata, 1.0)


def test_attention_of_no_token() -> None:
    pages = _pool(2, 1, 4, 8, torch.float32)
    empty = torch.zeros(0, dtype=torch.int32)
    metadata = ops.AttentionMetadata(
        torch.zeros(1, dtype=torch.int32), empty, empty.view(0, 1), empty.long(), 0, 0
    )
    assert ops.paged_attention(torch.empty(0, 2, 8), pages, metadata, 1.0).shape == (0, 2, 8)


def test_attention_refuses_shapes_that_do_not_match() -> None:
    pages = _pool(7, 2, 4, 8, torch.float32)
    metadata = ops.AttentionMetadata(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([1], dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        1,
        1,
    )
    for heads, dim in ((3, 8), (2, 10)):
        with pytest.raises(UnsupportedError, match="paged_attention"):
            ops.paged_attention(draw(1, heads, dim), pages, metadata, 1.0)
