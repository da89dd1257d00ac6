"""SwiGLU's element-wise half."""

from collections.abc import Iterator
from functools import partial

import torch

from moestro.ops.registry import op
from moestro.ops.testing import FLOAT_DTYPES, Arguments, Case, normal


def _cases() -> Iterator[Case]:
    for dtype in FLOAT_DTYPES:
        for shape in ((0, 8), (1, 2), (1, 64), (3, 66), (5, 254), (2, 3, 8), (2, 4098)):
            yield Case(f"{list(shape)}", dtype, partial(_draw, shape, dtype, 3.0))
        yield Case("saturated", dtype, partial(_draw, (3, 64), dtype, 60.0))


def _draw(
    shape: tuple[int, ...], dtype: torch.dtype, scale: float, generator: torch.Generator
) -> Arguments:
    return {"x": normal(generator, *shape, dtype=dtype, scale=scale)}


@op(cases=_cases)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, with gate = x[..., :I] and up = x[..., I:].

    x: [..., 2 I]. Returns [..., I] in x's dtype; arithmetic in fp32, rounded once.
    Source: Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """
    gate, up = x.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)
