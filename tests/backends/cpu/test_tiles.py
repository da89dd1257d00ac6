"""Products on the tile unit: the sums they make, the integers they share with every other level.

They run at `amx` where the machine has it, and at `amx-emulated` in builds that have that.
"""

from collections.abc import Iterator

import pytest
import torch
from tests.backends.cpu.levels import LEVELS, at_level, draw, same_bits, single_threaded

from moestro import ops
from moestro.backends.cpu import library
from moestro.backends.cpu.packing import pack
from moestro.ops.linear import QUANTIZED_FORMATS
from moestro.quant.format import WeightFormat, WeightTensor
from moestro.quant.weight import quantize, values

TILES = tuple(level for level in LEVELS if level.startswith("amx"))
pytestmark = pytest.mark.skipif(not TILES, reason="no level with tiles here")

BF16 = WeightFormat("bfloat16")
INTEGERS = (
    (WeightFormat("w8a8"), 333),
    (WeightFormat("w8a8"), 2112),
    (WeightFormat("w4a8", 8), 40),
    (WeightFormat("w4a8", 24, has_zeros=True), 1080),
    (WeightFormat("w4a8", 32), 1056),
    (WeightFormat("w4a8", 96, fp32_scales=True), 672),
    (WeightFormat("w4a8", 128, has_zeros=True, fp32_scales=True), 640),
    (WeightFormat("w4a8", 512, has_zeros=True), 1536),
    (WeightFormat("w4a8", 1024), 2048),
)
"""Formats and widths: rests of tiles and of stretches, groups smaller and larger than either."""
STEP, BLOCK = 32, 512
"""k of a bf16 tile, and of a block that is summed apart."""


@pytest.fixture(params=TILES)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from at_level(request)


def _weight(weight_format: WeightFormat, *shape: int, paired: bool = False) -> WeightTensor:
    return quantize(draw(*shape, scale=shape[-1] ** -0.5), weight_format, paired=paired)


@pytest.mark.parametrize(("weight_format", "inputs"), INTEGERS, ids=str)
@pytest.mark.parametrize("outputs", [70, 33, 32, 140])
def test_integers_equal_those_without_tiles(
    weight_format: WeightFormat, inputs: int, outputs: int, level: str
) -> None:
    weight, x = pack(_weight(weight_format, outputs, inputs)), draw(70, inputs) * 3
    x[5], x[9, 3] = 0.0, float("nan")
    with library.native().at_level("portable"):
        exact = ops.linear(x, weight)
    for rows in (1, 5, 6, 7, 8, 9, 16, 17, 31, 33, 70):
        assert same_bits(ops.linear(x[:rows], weight), exact[:rows]), f"{rows} rows"


@pytest.mark.parametrize("weight_format", [BF16, *QUANTIZED_FORMATS], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(weight_format: WeightFormat, level: str) -> None:
    weight, x = pack(_weight(weight_format, 115, 1280)), draw(201, 1280, dtype=torch.bfloat16)
    whole = ops.linear(x, weight, torch.float32)
    assert same_bits(whole, single_threaded(lambda: ops.linear(x, weight, torch.float32)))
    for size in (1, 2, 6, 7, 15, 16, 17, 32, 33, 48, 65, 193):
        for at in (0, 201 - size):
            part = ops.linear(x[at : at + size], weight, torch.float32)
            assert same_bits(part, whole[at : at + size]), f"{size} rows from {at}"


@pytest.mark.parametrize("weight_format", [BF16, *QUANTIZED_FORMATS], ids=str)
def test_a_token_has_the_same_bits_in_any_batch(weight_format: WeightFormat, level: str) -> None:
    hidden, inner, tokens = 256, 128, 75
    weights = ops.ExpertWeights(
        pack(_weight(weight_format, 3, 2 * inner, hidden, paired=True)),
        pack(_weight(weight_format, 3, hidden, inner)),
        pack(_weight(weight_format, 2 * inner, hidden, paired=True)),
        pack(_weight(weight_format, hidden, inner)),
    )
    x = draw(tokens, hidden, dtype=torch.bfloat16)
    # Expert 2 serves one token in nine, so experts of few and of many rows meet in a call.
    ids = torch.tensor([[0, 2] if t % 9 == 0 else [t % 2, 1 - t % 2] for t in range(tokens)])
    routing = ops.Routing(ids.int(), torch.rand(tokens, 2))
    whole = ops.moe_experts(x, routing, weights, True)
    for rows in (slice(0, 1), slice(8, 11), slice(0, 40), slice(60, 75), slice(74, 75)):
        part = ops.Routing(routing.topk_ids[rows], routing.topk_weights[rows])
        assert same_bits(ops.moe_experts(x[rows], part, weights, True), whole[rows]), rows


@pytest.mark.parametrize(
    "weight_format", [BF16, WeightFormat("fp8"), WeightFormat("fp8", 128)], ids=str
)
@pytest.mark.parametrize("inputs", [64, 1124])
def test_bf16_is_summed_as_the_tile_unit_does(
    weight_format: WeightFormat, inputs: int, level: str
) -> None:
    if level != library.EMULATED:
        pytest.skip("the manual's order is the emulation's; a processor's is its own")
    weight, x = _weight(weight_format, 50, inputs), draw(21, inputs, dtype=torch.bfloat16)
    ours = ops.linear(x, pack(weight), torch.float32)
    assert same_bits(ours, _as_tiles_sum(x, weight))


def _as_tiles_sum(x: torch.Tensor, weight: WeightTensor) -> torch.Tensor:
    """x @ weight.T: even and odd k apart over a tile's k, tiles of a block, then blocks."""
    name, scales = weight.format.name, weight.scales
    group = weight.format.group_size or BLOCK
    wide = weight.codes.float() if name == "fp8" else values(weight).float()
    total = torch.zeros(len(x), weight.num_rows)
    for block, start in enumerate(range(0, weight.in_features, group)):
        end = min(start + group, weight.in_features)
        acc = torch.zeros_like(total)
        for k in range(start, end, STEP):
            # A product of two bf16 numbers is exact in fp32, so adding it rounds once, as fused.
            apart = [torch.zeros_like(total) for _ in range(2)]
            for i in range(k, min(k + STEP, end)):
                apart[(i - k) % 2] += x[:, i].float()[:, None] * wide[:, i]
            acc += apart[0] + apart[1]
        if weight.format.group_size and scales is not None:
            total = (acc.double() * scales[:, block].double() + total.double()).float()
        else:
            total = total + acc
    if name == "fp8" and not weight.format.group_size and scales is not None:
        total = total * scales[:, 0]
    return total


def test_subnormal_numbers_count_as_zero(level: str) -> None:
    x, weight = torch.full((20, 64), 1e-39), torch.ones(16, 64)
    assert x.bfloat16().any()
    assert not ops.linear(x.bfloat16(), weight.bfloat16(), torch.float32).any()
