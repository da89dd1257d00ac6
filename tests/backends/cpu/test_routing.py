"""The router: accuracy against float64, its bound, ties, odd numbers, counts, the same bits."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.backends.cpu.levels import LEVELS, assert_close, at_level, draw, same_bits

from moestro import ops
from moestro.backends.cpu import library
from moestro.backends.cpu.routing import pack_router
from moestro.errors import UnsupportedError
from moestro.ops.routing import split_weight

BF16 = torch.bfloat16
RULE = ops.GatingRule(8, "sigmoid", True, 1e-20, 2.826)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from at_level(request)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("experts", [3, 64, 193])
def test_gating_is_right(scoring: str, renormalize: bool, experts: int) -> None:
    logits, bias = draw(40, experts, scale=3.0), draw(experts)
    rule = ops.GatingRule(3, scoring, renormalize, 1e-20, 2.5)
    routing = ops.moe_gating_top_k(logits, bias, rule)
    scores = logits.double()
    scores = scores.sigmoid() if scoring == "sigmoid" else scores.softmax(-1)
    order = (scores + bias.double()).sort(dim=-1, descending=True, stable=True).indices[:, :3]
    assert torch.equal(routing.topk_ids.long(), order)
    weights = scores.gather(1, order)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    assert_close(routing.topk_weights, weights * 2.5, 4)


def test_gating_breaks_ties_by_the_lowest_index() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [50.0, 60.0, 70.0, 0.0, 80.0]])
    rule = ops.GatingRule(4, "sigmoid", renormalize=False, epsilon=0.0, scaling=1.0)
    ids = ops.moe_gating_top_k(logits, None, rule).topk_ids
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 4]]  # sigmoid is 1 in fp32 from 17 on


def test_gating_of_no_numbers_still_names_different_experts() -> None:
    logits = torch.full((2, 8), float("nan"))
    for scoring in ("sigmoid", "softmax"):
        rule = ops.GatingRule(5, scoring, renormalize=True, epsilon=1e-20, scaling=1.0)
        ids = ops.moe_gating_top_k(logits, None, rule).topk_ids
        assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_gating_of_a_row_does_not_depend_on_the_batch() -> None:
    logits, bias = draw(70, 65), draw(65)
    for scoring in ("sigmoid", "softmax"):
        rule = replace(RULE, scoring=scoring)
        whole = ops.moe_gating_top_k(logits, bias, rule)
        for i in (0, 33, 69):
            one = ops.moe_gating_top_k(logits[i : i + 1], bias, rule)
            assert torch.equal(one.topk_ids, whole.topk_ids[i : i + 1])
            assert same_bits(one.topk_weights, whole.topk_weights[i : i + 1])


def test_gating_refuses_more_choices_than_experts() -> None:
    with pytest.raises(UnsupportedError, match="moe_gating_top_k"):
        ops.moe_gating_top_k(torch.zeros(1, 4), None, replace(RULE, top_k=5))


def _error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits.double() - exact).abs().mean() / exact.std())


@pytest.mark.usefixtures("level")
def test_two_bf16_terms_give_fp32_logits() -> None:
    x, weight = draw(256, 4096, dtype=BF16), draw(192, 4096, scale=0.006)
    exact = x.double() @ weight.double().T
    dual = ops.RouterWeights.of(weight, None, BF16)
    assert dual.terms == 2
    assert _error(ops.router_logits(x, dual), exact) <= 4e-6
    assert _error(ops.router_logits(x.float(), replace(dual, terms=0)), exact) <= 1e-6
    assert _error(ops.router_logits(x, replace(dual, terms=1)), exact) > 5e-4
    chosen = ops.moe_router(x, dual, RULE).topk_ids.long().sort().values
    assert torch.equal(chosen, exact.topk(8).indices.sort().values)


@pytest.mark.usefixtures("level")
def test_near_ties_flip_only_below_the_bound() -> None:
    # Experts in pairs whose weights differ by 1e-7 to 1e-4 of a weight in one place each.
    hidden, experts = 512, 64
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn((experts, hidden), generator=generator) * 0.02
    weight[1::2] = weight[::2]
    places = torch.randint(hidden, (experts // 2,), generator=generator)
    gaps = torch.logspace(-7, -4, experts // 2)
    weight[torch.arange(1, experts, 2), places] += gaps
    x = torch.randn((400, hidden), generator=generator).to(BF16)
    exact = x.double() @ weight.double().T
    bound = (2**-17 + hidden * 2**-24) * (x.double().abs() @ weight.double().abs().T)
    logits = ops.router_logits(x, ops.RouterWeights.of(weight, None, BF16)).double()
    assert bool(((logits - exact).abs() <= bound).all())
    gap = (exact[:, 1::2] - exact[:, ::2]).abs()
    flipped = (logits[:, 1::2] > logits[:, ::2]) != (exact[:, 1::2] > exact[:, ::2])
    assert bool(flipped.any())
    assert bool((gap[flipped] <= 2 * bound[:, ::2][flipped]).all())


def test_the_split_keeps_a_weight_to_seventeen_bits() -> None:
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-100, 100, (200_000,), generator=generator)
    weight = (1 + torch.rand(200_000, generator=generator)) * 2.0 ** exponents.double()
    weight = torch.cat([weight.float(), -weight.float(), torch.tensor([0.0, -0.0])])
    high, low = (part.double() for part in split_weight(weight))
    error = (weight.double() - (high + low / 256)).abs()
    assert bool((error <= 2**-17 * weight.double().abs()).all())
    assert float(error.max()) > 0


def test_bf16_weights_take_one_term_and_the_same_bits() -> None:
    weight = draw(40, 300).bfloat16().float()
    router = ops.RouterWeights.of(weight, None, BF16)
    assert router.terms == 1
    x = draw(9, 300, dtype=BF16)
    two = ops.router_logits(x, replace(router, terms=2))
    assert same_bits(ops.router_logits(x, router), two)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.usefixtures("level")
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, threads: int) -> None:
    x = draw(1200, 700, dtype=dtype)
    router = pack_router(ops.RouterWeights.of(draw(100, 700), draw(100), dtype))
    whole, logits = ops.moe_router(x, router, RULE), ops.router_logits(x, router)
    library.native().set_num_threads(threads)  # the fixture sets it back
    for begin, end in ((0, 1), (1199, 1200), (5, 12), (3, 101), (100, 700)):
        part = ops.moe_router(x[begin:end], router, RULE)
        assert torch.equal(part.topk_ids, whole.topk_ids[begin:end])
        assert same_bits(part.topk_weights, whole.topk_weights[begin:end])
        assert same_bits(ops.router_logits(x[begin:end], router), logits[begin:end])


def test_logits_and_choice_agree() -> None:
    x, bias = draw(70, 200, dtype=BF16), draw(48)
    router = ops.RouterWeights.of(draw(48, 200), bias, BF16)
    routing = ops.moe_router(x, router, RULE)
    logits = ops.router_logits(x, router)
    apart = ops.moe_gating_top_k(logits, bias, RULE)
    assert torch.equal(routing.topk_ids, apart.topk_ids)
    assert same_bits(routing.topk_weights, apart.topk_weights)


@pytest.mark.parametrize("tokens", [0, 1, 7, 500])
def test_tokens_are_counted_per_expert(tokens: int) -> None:
    x, router = draw(tokens, 64, dtype=BF16), ops.RouterWeights.of(draw(70, 64), None, BF16)
    counts = torch.full((70,), 2**40)
    routing = ops.moe_router(x, router, RULE, counts)
    expected = torch.bincount(routing.topk_ids.flatten().long(), minlength=70)
    assert torch.equal(counts - 2**40, expected)


@pytest.mark.usefixtures("level")
def test_numbers_that_are_none_stay_in_their_row() -> None:
    x = draw(5, 64, dtype=BF16)
    router = ops.RouterWeights.of(draw(20, 64), None, BF16)
    clean = ops.router_logits(x, router)
    x[1, 3], x[3, 5] = float("nan"), float("inf")
    logits = ops.router_logits(x, router)
    assert bool(logits[1].isnan().all())
    assert not bool(logits[3].isfinite().any())
    assert same_bits(logits[[0, 2, 4]], clean[[0, 2, 4]])
    ids = ops.moe_router(x, router, RULE).topk_ids
    assert all(len(set(row)) == 8 for row in ids.tolist())


def test_the_router_refuses_what_does_not_fit() -> None:
    router = ops.RouterWeights.of(draw(8, 64), None, BF16)
    x = draw(2, 64, dtype=BF16)
    with pytest.raises(UnsupportedError, match="moe_router"):
        ops.moe_router(x, router, replace(RULE, top_k=9))
    with pytest.raises(UnsupportedError, match="moe_router"):
        ops.moe_router(x.float(), router, RULE)  # bf16 terms need bf16 activations
    with pytest.raises(UnsupportedError, match="moe_router"):
        ops.moe_router(x, router, RULE, torch.zeros(9, dtype=torch.int64))
    with pytest.raises(UnsupportedError, match="router_logits"):
        ops.router_logits(draw(2, 63, dtype=BF16), router)
