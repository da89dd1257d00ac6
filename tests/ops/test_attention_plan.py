"""The task map of attention: every super-tile once, loads bounded, native and Python alike."""

import runpy
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moestro.backends.cpu  # noqa: F401 -- registers the bodies
from moestro import ops
from moestro.backends.cpu import library
from moestro.ops.attention_plan import (
    SUPER_TILE,
    AttentionPlan,
    PlanShape,
    cut_units,
    find_units,
    make_plan,
    position_cost,
)

ROOT = Path(__file__).parents[2]
SHAPES = st.builds(
    lambda group, kv_heads, dim, row_bytes, parts: PlanShape(
        group * kv_heads, kv_heads, dim, row_bytes, parts
    ),
    st.sampled_from((1, 2, 3, 5, 8, 12, 16, 64)),
    st.integers(1, 4),
    st.sampled_from((6, 64, 128, 256)),
    st.sampled_from((132, 264, 512)),
    st.integers(1, 9),
)
SEQUENCES = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 3000), st.sampled_from((0, 511, 512, 40_000, 262_000))),
        st.one_of(st.integers(0, 3), st.sampled_from((64, 65, 200))),
    ),
    max_size=6,
)
"""(context, queries) of each sequence."""


def _lengths(sequences: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    starts = [0]
    for _, queries in sequences:
        starts.append(starts[-1] + queries)
    return starts, [context + queries for context, queries in sequences]


def _costs(
    plan: AttentionPlan, starts: list[int], lengths: list[int], shape: PlanShape
) -> list[int]:
    units = {(u.seq, u.block): u for u in find_units(starts, lengths, shape)}
    costs = []
    for task in plan.tasks:
        unit = units[task.seq, task.block]
        positions = min(task.end * SUPER_TILE, unit.length) - task.begin * SUPER_TILE
        costs.append(positions * position_cost(shape, unit.rows))
    return costs


def _check_slots(plan: AttentionPlan, shape: PlanShape) -> None:
    """Each state that a cut unit hands on has a place of its own."""
    places = []
    for task in plan.tasks:
        if task.cut < 0:
            assert task.begin == 0
        elif task.begin == 0:
            places.append(task.slot)
            assert task.end == task.first_end
        else:
            later = range(task.begin, task.end)
            places += [task.slot + 1 + super_tile - task.first_end for super_tile in later]
    assert sorted(places) == list(range(plan.num_slots))
    assert {t.cut for t in plan.tasks if t.cut >= 0} == set(range(plan.num_cut))


@given(SEQUENCES, SHAPES)
def test_every_super_tile_is_computed_once(
    sequences: list[tuple[int, int]], shape: PlanShape
) -> None:
    starts, lengths = _lengths(sequences)
    plan = make_plan(starts, lengths, shape)
    done = Counter(
        (t.seq, t.kv_head, t.block, s) for t in plan.tasks for s in range(t.begin, t.end)
    )
    wanted = [
        (unit.seq, head, unit.block, s)
        for unit in find_units(starts, lengths, shape)
        for head in range(shape.num_kv_heads)
        for s in range(unit.num_supers)
    ]
    assert done == Counter(wanted)
    empty = {seq for seq, (_, queries) in enumerate(sequences) if not queries}
    assert not any(task.seq in empty for task in plan.tasks)
    _check_slots(plan, shape)
    words = plan.words(shape, len(lengths), starts[-1])
    assert len(words) <= shape.capacity(len(lengths), starts[-1])
    assert plan == make_plan(starts, lengths, shape)


@given(SEQUENCES, SHAPES)
def test_the_load_is_bounded(sequences: list[tuple[int, int]], shape: PlanShape) -> None:
    """Tasks taken in order by whoever is free: no part has more than the mean and one task, and a
    task is no more than its share unless a single super-tile is."""
    starts, lengths = _lengths(sequences)
    plan = make_plan(starts, lengths, shape)
    costs = _costs(plan, starts, lengths, shape)
    assert costs == sorted(costs, reverse=True)
    loads = [0] * shape.num_parts
    for cost in costs:
        loads[loads.index(min(loads))] += cost
    mean = sum(costs) / shape.num_parts
    assert max(loads) <= mean + max(costs, default=0)
    one = max((position_cost(shape, u.rows) for u in find_units(starts, lengths, shape)), default=0)
    assert max(loads) <= max(mean * (1 + 1 / 8), mean * (1 + 1 / 16) + 1, mean + SUPER_TILE * one)


def test_a_long_sequence_among_short_ones_is_shared() -> None:
    lengths = [32768] + [1024] * 15
    plan = make_plan(list(range(17)), lengths, PlanShape(8, 1, 128, 512, 2))
    assert plan.num_cut == 1
    largest = max((t.end - t.begin) * SUPER_TILE for t in plan.tasks)
    assert largest <= sum(lengths) / 16
    even = make_plan(list(range(17)), [1024] * 16, PlanShape(8, 1, 128, 512, 2))
    assert even.num_cut == 0
    assert make_plan(list(range(17)), lengths, PlanShape(8, 1, 128, 512, 1)).num_cut == 0


@pytest.mark.skipif(not library.has_native(), reason="needs the kernel library")
@given(SEQUENCES, SHAPES)
def test_the_native_plan_is_the_same(sequences: list[tuple[int, int]], shape: PlanShape) -> None:
    starts, lengths = _lengths(sequences)
    codes = shape.row_bytes // 2 - shape.head_dim * 2  # any pages of these heads and bytes
    dtype = torch.bfloat16 if codes >= 0 else torch.int8
    k, v = torch.zeros((2, 1, shape.num_kv_heads, 4096, shape.head_dim), dtype=dtype)
    scales = torch.zeros((2, 1, shape.num_kv_heads, 4096)) if dtype == torch.int8 else (None, None)
    pages = ops.KVPages(k, v, *scales)
    table = torch.zeros((len(lengths), 80), dtype=torch.int32)
    arguments = (
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        table,
        pages,
        shape.num_heads,
        starts[-1],
        shape.num_parts,
    )
    native = ops.attention_plan(*arguments)
    assert torch.equal(native, ops.attention_plan.reference(*arguments))


@pytest.mark.skipif(not library.has_native(), reason="needs the kernel library")
def test_no_plan_changes_a_bit() -> None:
    """Any cuts, in any order of tasks, and none at all."""
    generator = torch.Generator().manual_seed(3)
    lengths, queries = [1700, 40, 2100], [3, 1, 30]
    pages = ops.KVPages(*torch.randn(2, 64, 2, 64, 64, generator=generator).bfloat16())
    starts = [0, 3, 4, 34]
    metadata = ops.AttentionMetadata(
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.randint(64, (3, 34), generator=generator).int(),
        torch.zeros(34, dtype=torch.int64),
        max(queries),
        max(lengths),
    )
    q = torch.randn(34, 8, 64, generator=generator).bfloat16()
    expected = ops.paged_attention(q, pages, metadata, 0.125)
    shape = PlanShape(8, 2, 64, 256, 2)
    units = find_units(starts, lengths, shape)
    for step in (1, 2, 3, 100):
        plan = cut_units(units, [step] * len(units), shape)
        for tasks in (plan.tasks, plan.tasks[::-1]):
            other = AttentionPlan(tasks, plan.num_cut, plan.num_slots, plan.state_rows)
            words = torch.tensor(other.words(shape, 3, 34), dtype=torch.int32)
            given_plan = ops.AttentionMetadata(
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.page_table,
                metadata.slot_mapping,
                metadata.max_query_len,
                metadata.max_seq_len,
                words,
            )
            assert torch.equal(ops.paged_attention(q, pages, given_plan, 0.125), expected)
            wrong = words.clone()
            wrong[8] = 3  # a sequence that is not there
            with pytest.raises(ValueError, match="task 0 of the attention plan"):
                ops.paged_attention(
                    q,
                    pages,
                    ops.AttentionMetadata(
                        *(getattr(given_plan, name) for name in given_plan.__slots__[:-1]), wrong
                    ),
                    0.125,
                )
    with pytest.raises(ValueError, match="another batch"):
        ops.paged_attention(
            q[:33],
            pages,
            ops.AttentionMetadata(
                torch.tensor([0, 3, 4, 33], dtype=torch.int32),
                *(getattr(given_plan, name) for name in given_plan.__slots__[1:]),
            ),
            0.125,
        )


def test_the_picture_is_current() -> None:
    drawing = runpy.run_path(str(ROOT / "scripts" / "draw_attention_plan.py"))
    assert (ROOT / "docs" / "attention-plan.svg").read_text() == drawing["draw"]()
