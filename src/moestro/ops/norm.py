"""RMSNorm: alone, fused with the residual addition, and of an MTP layer's two inputs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from moestro.ops.registry import op
from moestro.ops.testing import FLOAT_DTYPES, Arguments, Case, norm_weight, normal

_SHAPES = ((0, 64), (1, 1), (1, 64), (3, 65), (5, 127), (2, 3, 32), (2, 4100))


def _cases() -> Iterator[Case]:
    for dtype in FLOAT_DTYPES:
        for shape in _SHAPES:
            yield Case(f"{list(shape)}", dtype, partial(_draw, shape, dtype))
        yield Case("tiny values, eps counts", dtype, partial(_draw, (4, 96), dtype, scale=2e-3))
        yield Case("large values", dtype, partial(_draw, (4, 96), dtype, scale=5e3))
        yield Case("zero rows", dtype, partial(_draw, (2, 16), dtype, scale=0.0))
        yield Case("every other column", dtype, partial(_draw, (3, 40), dtype, step=2))
    yield Case("bf16 weight", torch.float32, partial(_draw, (3, 50), torch.float32, mixed=True))


def _draw(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    scale: float = 1.0,
    step: int = 1,
    mixed: bool = False,
) -> Arguments:
    x = normal(generator, *shape, dtype=dtype, scale=scale)[..., ::step]
    weight = norm_weight(generator, x.shape[-1], torch.bfloat16 if mixed else dtype)
    return {"x": x, "weight": weight, "eps": 1e-5}


def _add_cases() -> Iterator[Case]:
    for case in _cases():
        yield replace(case, make=partial(_draw_pair, case.make))


def _draw_pair(
    make: Callable[[torch.Generator], Arguments], generator: torch.Generator
) -> Arguments:
    arguments = make(generator)
    return {**arguments, "residual": arguments["x"].flip(-1) * 0.5}


@op(cases=_cases)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x: [..., N] of any float dtype; weight: [N]. Returns [..., N] in x's dtype. All arithmetic in
    fp32, rounded once (HF rounds before the weight multiplication too: at most 1 ulp apart).
    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return (x32 * scale * weight.float()).to(x.dtype)


@op(cases=_add_cases)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(s), s) with s = x + residual rounded to x's dtype.

    x, residual: [..., N] of one dtype; weight: [N]. Returns new tensors (normed, new residual).
    The norm reads the rounded sum, as the unfused pair would.
    """
    summed = (x.float() + residual.float()).to(x.dtype)
    return rms_norm.reference(summed, weight, eps), summed


def _mtp_cases() -> Iterator[Case]:
    for dtype in FLOAT_DTYPES:
        for shape in ((0, 64), (1, 1), (1, 64), (3, 65), (40, 33), (2, 4100)):
            yield Case(f"{list(shape)}", dtype, partial(_draw_mtp, shape, dtype))
    make = partial(_draw_mtp, (3, 50), torch.float32, mixed=True)
    yield Case("bf16 weights", torch.float32, make)


def _draw_mtp(
    shape: tuple[int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    mixed: bool = False,
) -> Arguments:
    """Positions from 0 on, and 0 again in the middle, as where two sequences meet."""
    positions = torch.arange(shape[0])
    positions[shape[0] // 2 :] -= shape[0] // 2
    arguments = _draw(shape, dtype, generator, mixed=mixed)
    return {
        "embeddings": arguments["x"],
        "hidden_states": normal(generator, *shape, dtype=dtype, scale=3.0),
        "positions": positions,
        "embedding_weight": arguments["weight"],
        "hidden_weight": arguments["weight"].flip(0),
        "eps": 1e-5,
    }


@op(cases=_mtp_cases)
def mtp_input(
    embeddings: torch.Tensor,
    hidden_states: torch.Tensor,
    positions: torch.Tensor,
    embedding_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """What an MTP layer's eh_proj multiplies: rms_norm(embedding) beside rms_norm(hidden state).

    embeddings, of token i + 1, and hidden_states, of position i: [T, N] of one dtype; positions:
    [T] int64, i; embedding_weight, hidden_weight: [N]. An embedding counts as zeros at position 0,
    so its half of the row is zeros there. Returns [T, 2 N] in that dtype, each half with the bits
    of rms_norm. Source: the released hy_v3 checkpoint's layout and Tencent's trainer.
    """
    first = (positions == 0).unsqueeze(-1)
    embedded = rms_norm.reference(embeddings, embedding_weight, eps).masked_fill(first, 0)
    return torch.cat((embedded, rms_norm.reference(hidden_states, hidden_weight, eps)), dim=-1)
