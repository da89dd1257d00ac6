"""Matrix product with a weight stored as [out, in], and the embedding lookup."""

from collections.abc import Iterator
from functools import partial

import torch

from moestro.ops.registry import op
from moestro.ops.testing import FLOAT_DTYPES, Arguments, Case, normal
from moestro.quant.format import WeightTensor
from moestro.quant.weight import linear as quantized_linear


def _cases() -> Iterator[Case]:
    sizes = (
        (0, 8, 4),
        (1, 1, 1),
        (1, 64, 32),
        (3, 65, 7),
        (17, 33, 129),
        (5, 1100, 3),
        (130, 96, 70),
    )
    for dtype in FLOAT_DTYPES:
        for size in sizes:
            yield Case(f"{list(size)}", dtype, partial(_draw, size, dtype, dtype, None))
        for size in ((1, 72, 50), (6, 65, 33)):
            yield Case(
                f"{list(size)}, fp32 result",
                dtype,
                partial(_draw, size, dtype, dtype, torch.float32),
            )
            yield Case(
                f"{list(size)}, fp32 rows of weights in {dtype}",
                torch.float32,
                partial(_draw, size, torch.float32, dtype, None),
            )


def _draw(
    size: tuple[int, int, int],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    generator: torch.Generator,
) -> Arguments:
    """size: T, K, M."""
    tokens, width, out = size
    return {
        "x": normal(generator, tokens, width, dtype=dtype),
        "weight": normal(generator, out, width, dtype=weight_dtype, scale=width**-0.5),
        "out_dtype": out_dtype,
    }


@op(cases=_cases)
def linear(
    x: torch.Tensor, weight: torch.Tensor | WeightTensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """y = x @ weight.T with fp32 accumulation, rounded once.

    x: [T, K]; weight: [M, K], a float tensor or a WeightTensor, of x's dtype or, with fp32 x, any
    float dtype; or of a quantised format, with the arithmetic that quant/ gives it. Returns [T, M]
    in out_dtype (default: x's dtype). No bias: neither model family has one.
    """
    if isinstance(weight, WeightTensor):
        return quantized_linear(x, weight).to(out_dtype or x.dtype)
    return (x.float() @ weight.float().T).to(out_dtype or x.dtype)


def _embedding_cases() -> Iterator[Case]:
    for dtype in FLOAT_DTYPES:
        for tokens, vocab, hidden in ((0, 5, 8), (1, 1, 1), (3, 7, 33), (40, 9, 64)):
            name = f"{tokens} of [{vocab}, {hidden}]"
            yield Case(name, dtype, partial(_draw_rows, tokens, vocab, hidden, dtype))


def _draw_rows(
    tokens: int, vocab: int, hidden: int, dtype: torch.dtype, generator: torch.Generator
) -> Arguments:
    input_ids = torch.randint(0, vocab, (tokens,), generator=generator)
    input_ids[:2] = torch.tensor([vocab - 1, 0])[:tokens]
    return {"input_ids": input_ids, "weight": normal(generator, vocab, hidden, dtype=dtype)}


@op(cases=_embedding_cases)
def embedding(input_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of weight. input_ids: [T] int64 in [0, V); weight: [V, N]. Returns [T, N]."""
    return weight[input_ids]
