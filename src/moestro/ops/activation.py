"""SwiGLU's element-wise half."""

from collections.abc import Iterator

import torch

from moestro.ops.registry import op
from moestro.ops.testing import Case


def _cases() -> Iterator[Case]:
    yield from ()


@op(cases=_cases)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, with gate = x[..., :I] and up = x[..., I:].

    x: [..., 2 I]. Returns [..., I] in x's dtype; arithmetic in fp32, rounded once.
    Source: Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """
    gate, up = x.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)
