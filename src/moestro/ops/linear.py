"""Matrix product with a weight stored as [out, in], and the embedding lookup."""

from collections.abc import Iterator
from functools import partial

import torch

from moestro.ops.registry import op
from moestro.ops.testing import FLOAT_DTYPES, Arguments, Case, normal
from moestro.quant.format import WeightFormat, WeightTensor
from moestro.quant.weight import linear as quantized_linear
from moestro.quant.weight import quantize


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

    yield from _quantized_cases()


QUANTIZED_FORMATS = (
    WeightFormat("w8a8"),
    WeightFormat("w4a8", 32),
    WeightFormat("w4a8", 64),
    WeightFormat("w4a8", 128, has_zeros=True),
    WeightFormat("w4a8", 32, has_zeros=True, fp32_scales=True),
    WeightFormat("fp8"),
    WeightFormat("fp8", 128),
)
"""Formats that conformance runs on; fp32_scales says how scales are kept, not what they are."""


def _quantized_cases() -> Iterator[Case]:
    sizes = ((0, 128, 4), (1, 256, 64), (1, 384, 33), (3, 128, 70), (17, 640, 129), (40, 128, 16))
    odd = ((1, 1, 1), (2, 77, 30), (9, 333, 18), (4, 130, 17))  # widths that no group divides
    for weight_format in QUANTIZED_FORMATS:
        for dtype in FLOAT_DTYPES:
            for size in sizes if weight_format.name == "w4a8" else (*sizes, *odd):
                make = partial(_draw_quantized, size, dtype, weight_format)
                yield Case(f"{list(size)}, {weight_format}", dtype, make)


def _draw_quantized(
    size: tuple[int, int, int],
    dtype: torch.dtype,
    weight_format: WeightFormat,
    generator: torch.Generator,
) -> Arguments:
    """size: T, K, M."""
    tokens, width, out = size
    weight = normal(generator, out, width, dtype=torch.float32, scale=width**-0.5)
    return {
        "x": normal(generator, tokens, width, dtype=dtype),
        "weight": quantize(weight, weight_format),
        "out_dtype": None,
    }


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
def embedding(input_ids: torch.Tensor, weight: torch.Tensor | WeightTensor) -> torch.Tensor:
    """Rows of weight. Returns [T, N] in its dtype.

    input_ids: [T] int64 in [0, V); weight: [V, N], a float tensor or a WeightTensor of a float
    format (the table of a model that shares it with its head).
    """
    table = weight.codes if isinstance(weight, WeightTensor) else weight
    return table[input_ids]
