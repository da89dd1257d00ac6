"""Attention at the end of Hy3's longest context, and where offsets pass 2^31 elements."""

from collections.abc import Iterator

import pytest
import torch
from tests.backends.cpu.levels import LEVELS, at_level, same_bits, single_threaded

from moestro import ops
from moestro.quant.kv import quantize_rows

HEADS, KV_HEADS, DIM, PAGE = 64, 8, 128, 64
DTYPES = (torch.bfloat16, torch.int8, torch.float8_e4m3fn)


@pytest.fixture(params=LEVELS[:1], autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The best level of the machine."""
    yield from at_level(request)


class _Context:
    """Pages at the end of a pool too large to be touched whole; few kinds of page, repeated."""

    def __init__(self, length: int, dtype: torch.dtype, constant: float | None = None) -> None:
        num_pages = -(-length // PAGE)
        page_elements = KV_HEADS * PAGE * DIM
        first = 2**31 // page_elements + 3
        shape = (first + num_pages, KV_HEADS, PAGE, DIM)
        generator = torch.Generator().manual_seed(length)
        kinds = torch.randn(2, 16, KV_HEADS, PAGE, DIM, generator=generator)
        if constant is not None:
            kinds[1] = constant
        k, v = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
        scales = [None, None]
        if dtype.itemsize == 1:
            scales = [torch.empty(shape[:3]), torch.empty(shape[:3])]
        kind = torch.randint(16, (num_pages,), generator=generator)
        exact = []
        for pool, held, drawn in zip((k, v), scales, kinds, strict=True):
            if held is None:
                pool[first:] = drawn.to(dtype)[kind]
                exact.append(drawn.to(dtype).double())
            else:
                codes, rows = quantize_rows(drawn, dtype)
                pool.view(torch.uint8)[first:] = codes.view(torch.uint8)[kind]
                held[first:] = rows[kind]
                exact.append(codes.double() * rows.double()[..., None])
        assert k.stride(0) * first >= 2**31
        self.pages = ops.KVPages(k, v, *scales)
        self.length, self.kind, self.exact = length, kind, exact
        self.table = torch.arange(first, first + num_pages, dtype=torch.int32)[None]
        self.q = torch.randn(3, HEADS, DIM, generator=generator).bfloat16()

    def attend(self) -> torch.Tensor:
        """The last three positions."""
        metadata = ops.AttentionMetadata(
            torch.tensor([0, 3], dtype=torch.int32),
            torch.tensor([self.length], dtype=torch.int32),
            self.table,
            torch.zeros(3, dtype=torch.int64),
            3,
            self.length,
        )
        return ops.paged_attention(self.q, self.pages, metadata, DIM**-0.5)

    def expected(self, token: int, head: int) -> torch.Tensor:
        """One head of one of the queries, in float64."""
        seen = self.length - 2 + token
        keys, values = (
            t[:, head // (HEADS // KV_HEADS)][self.kind].flatten(0, 1)[:seen] for t in self.exact
        )
        scores = keys @ self.q[token, head].double() * DIM**-0.5
        return scores.softmax(0) @ values


LENGTHS = [
    pytest.param(20_011, id="20K"),
    pytest.param(262_144, id="256K"),
]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_end_of_a_long_context_is_right(dtype: torch.dtype, length: int) -> None:
    context = _Context(length, dtype)
    out = context.attend()
    assert same_bits(out, single_threaded(context.attend))
    for token, head in ((0, 0), (1, 13), (2, 40), (2, 63)):
        expected = context.expected(token, head)
        error = (out[token, head].double() - expected).square().mean().sqrt()
        assert error < 2.0**-8 * expected.square().mean().sqrt()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_constant_value_comes_out(dtype: torch.dtype, length: int) -> None:
    """Weights add up to one however many they are: sums of 22 bits would show here."""
    context = _Context(length, dtype, constant=0.7)
    out = context.attend().double()
    wanted = float(context.exact[1].flatten()[0])
    assert (out - wanted).abs().max() <= 2.0**-8 * wanted
