"""Weights of every format: on the layers of real models against float64, and at every level."""

from itertools import pairwise

import pytest
import torch
from tests.backends.cpu.levels import LEVELS, draw, same_bits

from moestro import ops
from moestro.backends.cpu import library
from moestro.backends.cpu.packing import pack
from moestro.ops.linear import QUANTIZED_FORMATS
from moestro.quant.format import WeightFormat, WeightTensor
from moestro.quant.int_group import quantize_activations
from moestro.quant.weight import expert, quantize, values

BF16 = WeightFormat("bfloat16")
INTEGERS = ("w8a8", "w4a8")
FORMATS = (BF16, WeightFormat("w8a8"), WeightFormat("w4a8", 32), WeightFormat("fp8", 128))
pytestmark = pytest.mark.skipif(not LEVELS, reason="needs the kernel library")


def _exact(x: torch.Tensor, weight: WeightTensor, rows: slice = slice(None)) -> torch.Tensor:
    """x @ weight.T for some rows of the weight, in float64, on the numbers that are multiplied."""
    wide = x.double()
    if weight.format.name in INTEGERS:
        codes, scales = quantize_activations(x)
        wide = codes.double() * scales.double()[:, None]
    return wide @ values(weight)[rows].double().T


def _off(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Error as a share of the exact result, by root mean square."""
    return float((ours.double() - exact).norm() / exact.norm())


def _weight(weight_format: WeightFormat, *shape: int, paired: bool = False) -> WeightTensor:
    drawn = torch.randn(shape, dtype=torch.bfloat16) * shape[-1] ** -0.5
    return quantize(drawn, weight_format, paired=paired)


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(4096, 10240), (8192, 4096), (2048, 5120), (4096, 2048)],
    ids=["Hy3 qkv", "Hy3 o", "Qwen3-30B-A3B qkv", "Qwen3-30B-A3B o"],
)
def test_projections_of_real_models(weight_format: WeightFormat, inputs: int, outputs: int) -> None:
    weight = _weight(weight_format, outputs, inputs)
    packed, x = pack(weight), draw(9, inputs, dtype=torch.bfloat16)
    whole = ops.linear(x, packed, torch.float32)
    for rows in (slice(0, 70), slice(outputs - 70, outputs)):
        assert _off(whole[:, rows], _exact(x, weight, rows)) < 2e-6
    for start, end in pairwise((0, 1, 3, 9)):
        assert same_bits(ops.linear(x[start:end], packed, torch.float32), whole[start:end])


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("hidden", "inner", "shared"), [(4096, 1536, True), (2048, 768, False)], ids=["Hy3", "Qwen3"]
)
def test_experts_of_real_models(
    weight_format: WeightFormat, hidden: int, inner: int, shared: bool
) -> None:
    gate_up = _weight(weight_format, 3, 2 * inner, hidden, paired=True)
    down = _weight(weight_format, 3, hidden, inner)
    both = (expert(gate_up, 2), expert(down, 2)) if shared else ()
    packed = ops.ExpertWeights(*(pack(w) for w in (gate_up, down, *both)))
    x = draw(7, hidden, dtype=torch.bfloat16)
    ids = torch.tensor([[0, 1], [1, 0], [1, 2], [1, 0], [0, 1], [1, 2], [1, 0]], dtype=torch.int32)
    routing = ops.Routing(ids, torch.rand(7, 2) + 0.2)
    ours = ops.moe_experts(x, routing, packed, True)
    exact = torch.zeros(7, hidden, dtype=torch.float64)
    for e in range(3):
        y = _expert(x, expert(gate_up, e), expert(down, e))
        exact += y * (routing.topk_weights * (ids == e)).sum(1, keepdim=True).double()
        if shared and e == 2:
            exact += y
    # One rounding to bfloat16, and activations that fall to the other code or number.
    assert _off(ours, exact) < 4e-3
    one = ops.Routing(ids[4:5], routing.topk_weights[4:5])
    assert same_bits(ops.moe_experts(x[4:5], one, packed, True), ours[4:5])


def _expert(x: torch.Tensor, gate_up: WeightTensor, down: WeightTensor) -> torch.Tensor:
    gate, up = _exact(x, gate_up).chunk(2, dim=1)
    return _exact((torch.nn.functional.silu(gate) * up).to(x.dtype), down)


@pytest.mark.parametrize(
    "weight_format", [f for f in QUANTIZED_FORMATS if f.name in INTEGERS], ids=str
)
def test_levels_agree_on_integers_to_the_bit(weight_format: WeightFormat) -> None:
    weight, x = pack(_weight(weight_format, 130, 512)), draw(11, 512) * 3
    results = []
    for level in LEVELS:
        with library.native().at_level(level):
            results.append(ops.linear(x, weight))
    assert all(same_bits(a, b) for a, b in pairwise(results))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("weight_format", [WeightFormat("w8a8"), WeightFormat("w4a8", 32)], ids=str)
def test_activations_of_no_numbers_and_none(level: str, weight_format: WeightFormat) -> None:
    weight, x = _weight(weight_format, 20, 64), draw(6, 64)
    x[1], x[3, 5], x[4, 7], x[5] = 0.0, float("inf"), float("nan"), 1e-38
    with library.native().at_level(level):
        y = ops.linear(x, pack(weight))
    assert y[3:5].isnan().all()
    assert not y[[1, 5]].any()
    assert _off(y[[0, 2]], _exact(x[[0, 2]], weight)) < 1e-6


def test_every_code_of_fp8_is_decoded() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = WeightTensor(WeightFormat("fp8"), (256, 1), codes[:, None], torch.ones(256, 1))
    for level in LEVELS:
        for dtype in (torch.bfloat16, torch.float32):
            with library.native().at_level(level):
                y = ops.linear(torch.ones(12, 1, dtype=dtype), pack(weight), torch.float32)
            for row in (y[:1], y):  # decoded line by line, and by the block
                assert torch.equal(
                    row.nan_to_num(7e5), codes.float().expand_as(row).nan_to_num(7e5)
                )
