"""A body that claims invariant=True gives a row the same bits whatever else is in the batch.

Held at each instruction set level of this machine, with the same arguments as conformance and on
larger random ones.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import moestro.backends.cpu  # noqa: F401 -- registers the bodies
from moestro import ops
from moestro.backends.cpu import library
from moestro.ops.registry import Body, Op
from moestro.ops.testing import Arguments, assert_same_bits, call, normal

LEVELS = library.native().levels() if library.has_native() else ("reference",)

ROWS: dict[Op, tuple[str, ...]] = {
    ops.rms_norm: ("x",),
    ops.add_rms_norm: ("x", "residual"),
    ops.mtp_input: ("embeddings", "hidden_states", "positions"),
    ops.silu_and_mul: ("x",),
    ops.linear: ("x",),
    ops.embedding: ("input_ids",),
    ops.qk_norm_rope: ("qkv", "cos_sin"),
    ops.qk_norm_rope_store: ("qkv", "rotary", "slot_mapping"),
    ops.moe_gating_top_k: ("router_logits",),
    ops.router_logits: ("x",),
    ops.moe_router: ("x",),
    ops.moe_experts: ("x", "routing"),
    ops.sample_tokens: ("logits", "metadata"),
    ops.token_logprobs: ("logits", "token_ids"),
}
"""Parameters that hold one row a token (or sequence); all else is shared by the rows."""
IN_PLACE = (ops.store_kv,)
"""Each touches an element at most once and alone: nothing to sum in another order."""
ELSEWHERE = (ops.attention_plan, ops.paged_attention, ops.sample)
"""Held below, and in test_sampling_step.py: rows of their arguments are more than slices."""
CLAIMS = [(op, b) for op in ROWS for b in op.bodies.get("cpu", ()) if b.invariant]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    native = library.has_native()
    with library.native().at_level(request.param) if native else nullcontext():
        yield request.param


def test_every_op_is_held_to_the_promise() -> None:
    assert set(ops.all_ops()) == {*ROWS, *IN_PLACE, *ELSEWHERE}


def test_the_native_library_keeps_the_promise_everywhere() -> None:
    if library.has_native():
        assert [op.name for op in ROWS if not op.bodies["cpu"][0].invariant] == []
        assert all(op.bodies["cpu"][0].invariant for op in ELSEWHERE)


@pytest.mark.parametrize(("op", "body"), CLAIMS, ids=[f"{o.name}-{b.name}" for o, b in CLAIMS])
def test_rows_keep_their_bits(op: Op, body: Body, level: str) -> None:
    for case in op.cases():
        arguments = case.draw()
        count = len(_tensors(arguments[ROWS[op][0]])[0])
        if not count or (body.when is not None and not body.when(**arguments)):
            continue
        whole = call(body.fn, arguments).returned
        for rows in _selections(count):
            part = {n: _take(v, rows) if n in ROWS[op] else v for n, v in arguments.items()}
            returned = call(body.fn, part).returned
            what = f"{op.name}, {case.name}, {case.dtype}, rows {rows}"
            assert_same_bits(returned, _take(whole, rows), what)


def _selections(count: int) -> list[list[int]]:
    """Rows alone, halves, an uneven share, and all of them in reverse."""
    alone = [[i] for i in sorted({0, 1 % count, count // 2, count - 1})]
    others = [list(range(count // 2, count)), list(range(0, count, 3)), [*range(count)][::-1]]
    return alone + others


def _tensors(value: Any) -> list[torch.Tensor]:
    if is_dataclass(value):
        return [getattr(value, f.name) for f in fields(value)]
    return [value]


def _take(value: Any, rows: Sequence[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return value[list(rows)]
    if isinstance(value, tuple):
        return tuple(_take(item, rows) for item in value)
    if isinstance(value, ops.Rotary):
        return replace(value, positions=value.positions[list(rows)])
    return replace(value, **{f.name: _take(getattr(value, f.name), rows) for f in fields(value)})


ATTENTION = [b for b in ops.paged_attention.bodies.get("cpu", ()) if b.invariant]


@pytest.mark.parametrize("body", ATTENTION, ids=lambda body: body.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(8, 1, 64, 16), (4, 2, 40, 64), (3, 3, 8, 7)], ids=str)
def test_attention_keeps_its_bits_under_chunking(
    shape: tuple[int, int, int, int], dtype: torch.dtype, body: Body, level: str
) -> None:
    length = 300
    sequence = _Sequence(shape, length, dtype)
    whole = sequence.attend(body, [(0, length)])
    for cuts in ((0, 1, 2, 300), (0, 64, 128, 300), (0, 63, 64, 191, 299, 300), (0, 150, 300)):
        runs = list(pairwise(cuts))
        parts = torch.cat([sequence.attend(body, [run]) for run in runs])
        assert_same_bits(parts, whole, f"chunks at {cuts}")
        together = sequence.attend(body, runs)
        assert_same_bits(together, whole, f"chunks at {cuts} as sequences of one batch")
    for position in (0, 1, 63, 64, 65, 127, 128, 255, 299):
        decoded = sequence.attend(body, [(position, position + 1)])
        assert_same_bits(decoded, whole[position : position + 1], f"decode at {position}")


class _Sequence:
    """One sequence's queries, keys and values in pages; shape is H, G, D, B."""

    def __init__(self, shape: tuple[int, int, int, int], length: int, dtype: torch.dtype) -> None:
        heads, kv_heads, dim, page_size = shape
        generator = torch.Generator().manual_seed(11)
        count = -(-length // page_size)
        self.page_size = page_size
        self.q = normal(generator, length, heads, dim, dtype=dtype, scale=2.0)
        pool = (count + 3, kv_heads, page_size, dim)
        self.pages = ops.KVPages(*(normal(generator, *pool, dtype=dtype) for _ in "kv"))
        self.table = torch.randperm(count + 3, generator=generator)[:count].int()

    def attend(self, body: Body, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Attention of the query runs [start, end), each as a sequence of length `end`."""
        counts = torch.tensor([0, *(end - start for start, end in runs)])
        ends = [end for _, end in runs]
        metadata = ops.AttentionMetadata(
            query_start_loc=counts.cumsum(0).int(),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            page_table=self.table.expand(len(runs), -1).contiguous(),
            slot_mapping=torch.full((int(counts.sum()),), -1),
            max_query_len=int(counts.max()),
            max_seq_len=max(ends),
        )
        q = torch.cat([self.q[start:end] for start, end in runs])
        arguments: Arguments = {"q": q, "pages": self.pages, "metadata": metadata}
        out: torch.Tensor = call(body.fn, {**arguments, "scale": q.shape[2] ** -0.5}).returned
        return out
