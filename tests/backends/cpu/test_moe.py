"""Experts: against float64, awkward routings, and the same bits in any batch."""

from collections.abc import Iterator
from dataclasses import replace

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

EXPERTS, TOP_K, HIDDEN, INNER, SHARED = 6, 3, 100, 44, 24


@pytest.fixture(params=LEVELS, autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from at_level(request)


def _weights(dtype: torch.dtype, shared: bool = True) -> ops.ExpertWeights:
    return ops.ExpertWeights(
        draw(EXPERTS, 2 * INNER, HIDDEN, dtype=dtype, scale=0.2),
        draw(EXPERTS, HIDDEN, INNER, dtype=dtype, scale=0.2),
        draw(2 * SHARED, HIDDEN, dtype=dtype, scale=0.2) if shared else None,
        draw(HIDDEN, SHARED, dtype=dtype, scale=0.2) if shared else None,
    )


def _routing(tokens: int) -> ops.Routing:
    ids = torch.rand(tokens, EXPERTS).argsort(dim=1)[:, :TOP_K].int()
    return ops.Routing(ids, torch.rand(tokens, TOP_K))


def _rows(routing: ops.Routing, rows: slice) -> ops.Routing:
    return ops.Routing(routing.topk_ids[rows], routing.topk_weights[rows])


def _swiglu64(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (x.double() @ gate_up.double().T).chunk(2, dim=-1)
    act = (gate * torch.sigmoid(gate) * up).to(x.dtype)
    return act.double() @ down.double().T


def _exact(x: torch.Tensor, routing: ops.Routing, w: ops.ExpertWeights) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for e, weight in zip(routing.topk_ids[t], routing.topk_weights[t], strict=True):
            y = _swiglu64(x[t : t + 1], w.gate_up_proj[int(e)], w.down_proj[int(e)])[0]
            out[t] += y * weight.double()
    if w.shared_gate_up_proj is not None and w.shared_down_proj is not None:
        out += _swiglu64(x, w.shared_gate_up_proj, w.shared_down_proj)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 2, 17, 40])
@pytest.mark.parametrize("shared", [True, False])
def test_experts_are_right(dtype: torch.dtype, tokens: int, shared: bool) -> None:
    x, routing, weights = (
        draw(tokens, HIDDEN, dtype=dtype),
        _routing(tokens),
        _weights(dtype, shared),
    )
    exact = _exact(x, routing, weights)
    # The activation's own rounding may fall the other way for a value halfway between two.
    assert_close(ops.moe_experts(x, routing, weights, True), exact, 4)


@pytest.mark.parametrize("tokens", [1, 130, 300])
def test_all_tokens_to_one_expert(tokens: int) -> None:
    x, weights = draw(tokens, HIDDEN, dtype=torch.bfloat16), _weights(torch.bfloat16)
    routing = ops.Routing(torch.full((tokens, 1), 4, dtype=torch.int32), torch.ones(tokens, 1))
    assert_close(ops.moe_experts(x, routing, weights, True), _exact(x, routing, weights), 4)


def test_an_expert_chosen_twice_by_a_token_counts_twice() -> None:
    x, weights = draw(3, HIDDEN), _weights(torch.float32)
    routing = ops.Routing(torch.tensor([[1, 1]] * 3, dtype=torch.int32), torch.ones(3, 2))
    assert_close(ops.moe_experts(x, routing, weights, True), _exact(x, routing, weights), 4)


def test_without_fp32_combine_both_parts_are_rounded_first() -> None:
    x, routing, weights = (
        draw(50, HIDDEN, dtype=torch.bfloat16),
        _routing(50),
        _weights(torch.bfloat16),
    )
    routed_only = replace(weights, shared_gate_up_proj=None, shared_down_proj=None)
    routed = ops.moe_experts(x, routing, routed_only, True)
    nothing = ops.Routing(routing.topk_ids, torch.zeros_like(routing.topk_weights))
    shared = ops.moe_experts(x, nothing, weights, True)
    assert same_bits(ops.moe_experts(x, routing, weights, False), routed + shared)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    x, routing, weights = draw(210, HIDDEN, dtype=dtype), _routing(210), _weights(dtype)
    whole = ops.moe_experts(x, routing, weights, True)
    alone = single_threaded(lambda: ops.moe_experts(x, routing, weights, True))
    assert same_bits(whole, alone)
    for rows in (slice(0, 1), slice(7, 9), slice(100, 117), slice(50, 210), slice(209, 210)):
        part = ops.moe_experts(x[rows], _rows(routing, rows), weights, True)
        assert same_bits(part, whole[rows]), rows
    x[5] = float("nan")
    spoilt = ops.moe_experts(x, routing, weights, True)
    assert same_bits(torch.cat((spoilt[:5], spoilt[6:])), torch.cat((whole[:5], whole[6:])))


@pytest.mark.parametrize("bad", [-1, EXPERTS])
def test_unknown_experts_are_refused(bad: int) -> None:
    routing = ops.Routing(torch.tensor([[0, bad]], dtype=torch.int32), torch.ones(1, 2))
    with pytest.raises(ValueError, match=rf"topk_ids\[1\] is {bad}"):
        ops.moe_experts(draw(1, HIDDEN), routing, _weights(torch.float32), True)


def test_shapes_that_do_not_match_are_refused() -> None:
    weights = _weights(torch.float32)
    with pytest.raises(UnsupportedError, match="moe_experts"):
        ops.moe_experts(draw(1, HIDDEN + 1), _routing(1), weights, True)
    with pytest.raises(UnsupportedError, match="moe_experts"):
        ops.moe_experts(draw(2, HIDDEN), _routing(1), weights, True)
    with pytest.raises(UnsupportedError, match="moe_experts"):
        ops.moe_experts(draw(1, HIDDEN, dtype=torch.float16), _routing(1), weights, True)
