"""Captured steps: shared memory, what is refused, stale ones, and a replay without Python."""

import functools
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from moestro import ops
from moestro.backends.cpu import library
from moestro.backends.cpu.arena import Arena
from moestro.errors import UnsupportedError

pytestmark = pytest.mark.skipif(not library.has_native(), reason="no kernel library was built here")

if library.has_native():
    from moestro.backends.cpu.graph import CapturedStep, GraphPool


def _mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Some layers, so that memory is reused."""
    for _ in range(4):
        x = ops.linear(ops.silu_and_mul(ops.linear(x, up)), down)
    return x


@pytest.fixture
def weights() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    up, down = torch.randn((256, 64), generator=generator), torch.randn(64, 128)
    return up * 0.1, down * 0.1


def test_a_replay_follows_its_inputs(weights: tuple[torch.Tensor, torch.Tensor]) -> None:
    x = torch.randn(5, 64)
    pool = GraphPool()
    captured = pool.capture(lambda: _mlp(x, *weights))
    assert captured.num_calls >= 12
    assert torch.equal(captured.result, _mlp(x, *weights))
    for _ in range(3):
        x.copy_(torch.randn(5, 64))
        captured.replay()
        assert torch.equal(captured.result, _mlp(x, *weights))


def test_memory_is_reused_within_and_between_steps(
    weights: tuple[torch.Tensor, torch.Tensor],
) -> None:
    pool = GraphPool()
    big, small = torch.randn(4096, 64), torch.randn(3, 64)
    first = pool.capture(lambda: _mlp(big, *weights))
    # Three tensors live at once at most; each layer would add 4096 x 448 floats.
    assert pool.num_bytes <= 4096 * (256 + 128 + 64) * 4 + 4 * 2**20
    before = pool.num_bytes
    second = pool.capture(lambda: _mlp(small, *weights))
    assert pool.num_bytes == before
    for captured, x in ((first, big), (second, small), (first, big)):
        captured.replay()
        assert torch.equal(captured.result, _mlp(x, *weights))


def test_a_step_that_torch_computes_is_refused(
    weights: tuple[torch.Tensor, torch.Tensor],
) -> None:
    x = torch.randn(5, 64)
    pool = GraphPool()
    with pytest.raises(UnsupportedError, match=r"torch computes aten\.add\.Tensor"):
        pool.capture(lambda: _mlp(x, *weights) + 1)
    pool.capture(lambda: _mlp(x, *weights).view(5, 8, 8).flatten(1)).replay()
    assert ops.linear(x, weights[0]).shape == (5, 256)  # the capture is over


def test_a_failing_call_is_named() -> None:
    ids, table = torch.tensor([1, 2]), torch.randn(4, 8)
    captured = GraphPool().capture(lambda: ops.embedding(ids, table))
    captured.replay()
    ids[1] = 4
    for replay in (captured.replay, captured.timed_replay):
        with pytest.raises(ValueError, match=r"call 0 of the graph, embedding: .*4"):
            replay()
    ids[1] = 3
    captured.replay()
    assert torch.equal(captured.result, table[[1, 3]])


def test_a_timed_replay_computes_the_same_and_tells_of_every_call(
    weights: tuple[torch.Tensor, torch.Tensor],
) -> None:
    x = torch.randn(5, 64)
    captured = GraphPool().capture(lambda: _mlp(x, *weights))
    x.copy_(torch.randn(5, 64))
    seconds = captured.timed_replay()
    assert torch.equal(captured.result, _mlp(x, *weights))
    assert len(seconds) == captured.num_calls
    assert all(s >= 0 for s in seconds)
    calls = captured.calls()
    assert [name for name, _ in calls if name in ("linear", "silu_and_mul")] == [
        *("linear", "silu_and_mul", "linear"),
    ] * 4
    widths = {a.weight.in_features for name, a in calls if name == "linear"}
    assert widths == {64, 128}


def test_a_change_of_level_or_threads_makes_it_stale(
    weights: tuple[torch.Tensor, torch.Tensor],
) -> None:
    native = library.native()
    x = torch.randn(2, 64)
    captured = GraphPool().capture(lambda: _mlp(x, *weights))
    assert captured.is_current()
    threads = native.num_threads()
    native.set_num_threads(threads + 1)
    assert not captured.is_current()
    native.set_num_threads(threads)
    assert captured.is_current()
    for level in native.levels():
        with native.at_level(level):
            assert captured.is_current() == (level == library.status().isa)


def test_what_the_calls_point_to_stays_alive() -> None:
    ids = torch.tensor([1, 2])
    captured = GraphPool().capture(functools.partial(ops.embedding, ids, torch.full((4, 8), 7.0)))
    del ids
    filler = [torch.zeros(4, 8) for _ in range(64)]
    captured.replay()
    assert float(captured.result.min()) == 7.0
    del filler


def test_a_closed_step_gives_up_its_tensors() -> None:
    ids, table = torch.tensor([0]), torch.ones(1, 4)
    captured = GraphPool().capture(lambda: ops.embedding(ids, table))
    captured.close()
    captured.close()
    assert captured.result is None


class _Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_python_and_no_torch_runs_in_a_replay(
    weights: tuple[torch.Tensor, torch.Tensor],
) -> None:
    x = torch.randn(5, 64)
    captured = GraphPool().capture(lambda: _mlp(x, *weights))
    frames: list[str] = []

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            frames.append(frame.f_code.co_qualname)

    with _Dispatched() as dispatched:
        sys.setprofile(profile)
        try:
            captured.replay()
        finally:
            sys.setprofile(None)
    assert frames == [CapturedStep.replay.__qualname__]  # the one that makes the native call
    assert dispatched.seen == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 700_000)), max_size=40))
def test_live_pieces_of_the_arena_never_overlap(wishes: list[tuple[bool, int]]) -> None:
    arena = Arena()
    for _ in range(2):  # a second capture over the same memory
        new_empty = arena.allocator()
        live: list[tuple[torch.Tensor, int]] = []
        for number, (drop, size) in enumerate(wishes):
            if drop and live:
                live.pop(size % len(live))
            made = new_empty((size,), torch.uint8)
            made.fill_(number % 251)
            assert arena.holds(made) or size == 0
            live.append((made[: size // 2], number % 251))  # a view keeps the whole piece
            del made
            assert all(bool((piece == value).all()) for piece, value in live)
    needed = sum(size + 64 for _, size in wishes)
    assert arena.num_bytes <= needed + len(wishes) * 2**20
