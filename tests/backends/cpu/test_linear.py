"""linear and embedding: against float64, and the same bits whatever else is in the batch."""

from collections.abc import Iterator

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

PAIRS = tuple((d, d) for d in DTYPES) + tuple((torch.float32, d) for d in DTYPES[1:])


@pytest.fixture(params=LEVELS, autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from at_level(request)


@pytest.mark.parametrize(("x_dtype", "weight_dtype"), PAIRS)
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"),
    [(0, 8, 8), (1, 1, 1), (1, 31, 9), (2, 64, 33), (5, 1500, 17), (33, 97, 130), (101, 2080, 3)],
)
def test_linear_is_right(
    x_dtype: torch.dtype, weight_dtype: torch.dtype, tokens: int, inputs: int, outputs: int
) -> None:
    x, weight = draw(tokens, inputs, dtype=x_dtype), draw(outputs, inputs, dtype=weight_dtype)
    exact = x.double() @ weight.double().T
    assert_close(ops.linear(x, weight, torch.float32), exact, 4)
    assert_close(ops.linear(x, weight), exact, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [40, 1056, 3000])
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, inputs: int) -> None:
    x, weight = draw(131, inputs, dtype=dtype), draw(77, inputs, dtype=dtype)
    whole = ops.linear(x, weight, torch.float32)
    assert same_bits(whole, single_threaded(lambda: ops.linear(x, weight, torch.float32)))
    for size in (1, 2, 3, 4, 5, 16, 17, 33, 64, 130):
        for at in (0, 131 - size):
            part = ops.linear(x[at : at + size], weight, torch.float32)
            assert same_bits(part, whole[at : at + size]), f"{size} rows from {at}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_and_other_weight_rows_do_not_matter(dtype: torch.dtype) -> None:
    x, weight = draw(20, 100, dtype=dtype), draw(50, 100, dtype=dtype)
    whole = ops.linear(x, weight)
    x[3], weight[11] = float("nan"), float("inf")
    spoilt = ops.linear(x, weight)
    rows = [i for i in range(20) if i != 3]
    columns = [j for j in range(50) if j != 11]
    assert same_bits(spoilt[rows][:, columns], whole[rows][:, columns])
    assert spoilt[3].isnan().all()


def test_strided_operands_are_taken() -> None:
    x, weight = draw(6, 80), draw(12, 80)
    ours = ops.linear(x[:, ::2], weight[:, ::2])
    assert same_bits(ours, ops.linear(x[:, ::2].contiguous(), weight[:, ::2].contiguous()))


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.zeros(2, 8), torch.zeros(4, 9)),
        (torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(4, 8)),
        (torch.zeros(2, 8, dtype=torch.float64), torch.zeros(4, 8, dtype=torch.float64)),
        (torch.zeros(2, 0), torch.zeros(4, 0)),
    ],
)
def test_linear_refuses_what_does_not_match(x: torch.Tensor, weight: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError, match="linear"):
        ops.linear(x, weight)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_embedding_copies_rows(dtype: torch.dtype) -> None:
    table = draw(9, 5, dtype=dtype)
    ids = torch.tensor([8, 0, 8, 3])
    assert torch.equal(ops.embedding(ids, table), table[ids])
    assert ops.embedding(ids[:0], table).shape == (0, 5)


@pytest.mark.parametrize("bad", [-1, 9, 2**62])
def test_embedding_refuses_unknown_ids(bad: int) -> None:
    with pytest.raises(ValueError, match=f"input_ids\\[1\\] is {bad}"):
        ops.embedding(torch.tensor([0, bad]), torch.zeros(9, 4))
