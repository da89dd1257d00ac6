"""Rotary rows: frequencies, accuracy, and independence of how the table grew."""

import math
from itertools import pairwise

import pytest
import torch

from moestro.core.model_spec import RopeSpec
from moestro.core.plan import ROTARY_BLOCK_POSITIONS
from moestro.errors import UnsupportedError
from moestro.layers.rotary import RotaryTable, rotary_frequencies

HY3 = RopeSpec(11158840.0)
YARN = RopeSpec(1e6, "yarn", 4.0, 32768, attention_factor=0.1 * math.log(4.0) + 1)


def _rows(table: RotaryTable, positions: list[int]) -> torch.Tensor:
    return table.up_to(max(positions) + 1)[positions]


@pytest.mark.parametrize("head_dim", [2, 24, 128])
def test_default_frequencies(head_dim: int) -> None:
    expected = [11158840.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    actual = rotary_frequencies(HY3, head_dim)
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_frequencies(truncate: bool) -> None:
    # Peng et al. 2023, section 3.2, pair by pair: full turns over the original context decide.
    dim, base, factor, context, fast, slow = 64, 5e4, 8.0, 4096, 24.0, 2.0
    rope = RopeSpec(base, "yarn", factor, context, fast, slow, 1.2, truncate)

    def pair(turns: float) -> float:
        return dim / 2 * math.log(context / (turns * 2 * math.pi), base)

    low, high = pair(fast), pair(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    expected = []
    for i in range(dim // 2):
        frequency = base ** (-2 * i / dim)
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        expected.append(frequency / factor * ramp + frequency * (1 - ramp))
    actual = rotary_frequencies(rope, dim)
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=2e-6, atol=0)


def test_yarn_leaves_fast_pairs_and_stretches_slow_ones() -> None:
    plain, yarn = rotary_frequencies(RopeSpec(1e6), 128), rotary_frequencies(YARN, 128)
    ratio = (plain / yarn).tolist()
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(4.0)
    assert all(a <= b + 1e-6 for a, b in pairwise(ratio))


def test_yarn_ramp_of_no_width_is_a_step() -> None:
    # 64 positions hold one full turn of pair 1.008: pairs 0 and 1 are kept, 2 and 3 stretched.
    rope = RopeSpec(1e4, "yarn", 4.0, 64, beta_fast=1.0, beta_slow=1.0, truncate=False)
    ratio = rotary_frequencies(RopeSpec(1e4), 8) / rotary_frequencies(rope, 8)
    torch.testing.assert_close(ratio, torch.tensor([1.0, 1.0, 4.0, 4.0]))


@pytest.mark.parametrize("rope", [HY3, YARN], ids=["default", "yarn"])
def test_rows_are_exact_far_out(rope: RopeSpec) -> None:
    table = RotaryTable(rope, 128, "cpu")
    frequencies = rotary_frequencies(rope, 128)
    positions = [
        0,
        1,
        ROTARY_BLOCK_POSITIONS - 1,
        ROTARY_BLOCK_POSITIONS,
        5 * ROTARY_BLOCK_POSITIONS + 3,
    ]
    for position, row in zip(positions, _rows(table, positions), strict=True):
        for i in (0, 1, 31, 63):
            angle = float(torch.tensor(float(position)) * frequencies[i])  # the fp32 product
            expected = [rope.attention_factor * f(angle) for f in (math.cos, math.sin)]
            actual = [float(row[i]), float(row[64 + i])]
            assert actual == pytest.approx(expected, abs=1.2e-7)


def test_rows_do_not_depend_on_the_growth_or_the_batch() -> None:
    at_once, step_by_step = (RotaryTable(YARN, 40, "cpu") for _ in range(2))
    positions = [5, 3 * ROTARY_BLOCK_POSITIONS + 7, 5, ROTARY_BLOCK_POSITIONS]
    whole = _rows(at_once, positions)
    single = torch.cat([_rows(step_by_step, [p]) for p in sorted(set(positions))])
    assert torch.equal(whole, single[[0, 2, 0, 1]])
    assert whole.dtype == torch.float32


def test_a_reserved_table_stays_where_it_is() -> None:
    table = RotaryTable(YARN, 40, "cpu")
    table.reserve(3 * ROTARY_BLOCK_POSITIONS - 5)
    addresses = {table.up_to(n).data_ptr() for n in (1, 4096, 4097, 3 * ROTARY_BLOCK_POSITIONS)}
    assert len(addresses) == 1
    positions = [0, 4096, 2 * ROTARY_BLOCK_POSITIONS + 11]
    before = _rows(table, positions)
    table.reserve(9 * ROTARY_BLOCK_POSITIONS)  # what is computed moves along
    assert torch.equal(_rows(table, positions), before)
    assert torch.equal(_rows(RotaryTable(YARN, 40, "cpu"), positions), before)


def test_other_kinds_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="llama3"):
        RotaryTable(RopeSpec(1e4, "llama3"), 8, "cpu")
    with pytest.raises(UnsupportedError, match="got 7"):
        RotaryTable(HY3, 7, "cpu")
