"""Matrix product with a weight stored as [out, in], and the embedding lookup."""

from collections.abc import Iterator

import torch

from moestro.ops.registry import op
from moestro.ops.testing import Case


def _cases() -> Iterator[Case]:
    yield from ()


@op(cases=_cases)
def linear(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """y = x @ weight.T with fp32 accumulation, rounded once.

    x: [T, K]; weight: [M, K], of x's dtype or, with fp32 x, any float dtype. Returns [T, M] in
    out_dtype (default: x's dtype). No bias: neither model family has one.
    """
    return (x.float() @ weight.float().T).to(out_dtype or x.dtype)


@op(cases=_cases)
def embedding(input_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of weight. input_ids: [T] int64 in [0, V); weight: [V, N]. Returns [T, N]."""
    return weight[input_ids]
