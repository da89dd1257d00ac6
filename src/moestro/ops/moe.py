"""Mixture of experts: running the chosen ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from moestro.ops.registry import op
from moestro.ops.routing import Routing
from moestro.ops.testing import FLOAT_DTYPES, Arguments, Case, normal
from moestro.quant.format import WeightFormat, WeightTensor
from moestro.quant.weight import expert as expert_of
from moestro.quant.weight import linear, quantize


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Stacked SwiGLU experts and the shared one, if any: float tensors, or WeightTensors.

    gate_up_proj: [E, 2 I, N], gate rows first; down_proj: [E, N, I];
    shared_gate_up_proj: [2 J, N]; shared_down_proj: [N, J].
    """

    gate_up_proj: torch.Tensor | WeightTensor
    down_proj: torch.Tensor | WeightTensor
    shared_gate_up_proj: torch.Tensor | WeightTensor | None = None
    shared_down_proj: torch.Tensor | WeightTensor | None = None


def _expert_cases() -> Iterator[Case]:
    sizes = (  # T, N, I, E, K, J
        (0, 32, 16, 4, 2, 16),
        (1, 32, 16, 4, 1, 0),
        (1, 33, 17, 6, 3, 5),
        (9, 64, 24, 32, 8, 48),
        (50, 40, 8, 5, 2, 0),
        (3, 130, 70, 3, 3, 70),
    )
    for dtype in FLOAT_DTYPES:
        for size in sizes:
            for fp32_combine in (False, True) if size[-1] else (False,):
                name = f"T, N, I, E, K, J = {list(size)}, fp32 combine {fp32_combine}"
                yield Case(name, dtype, partial(_draw_experts, size, dtype, fp32_combine))
        make = partial(_draw_experts, (40, 32, 16, 4, 1, 16), dtype, False)
        yield Case("all tokens to one expert", dtype, partial(make, only=2))
    yield from _quantized_cases()


_W4 = WeightFormat("w4a8", 32)


def _quantized_cases() -> Iterator[Case]:
    formats = (  # of the routed experts, and of the shared one
        (WeightFormat("w8a8"), WeightFormat("w8a8")),
        (_W4, _W4),
        (WeightFormat("w4a8", 64, has_zeros=True), WeightFormat("w8a8")),
        (WeightFormat("fp8", 128), WeightFormat("fp8", 128)),
        (WeightFormat("fp8"), WeightFormat("fp8", 128)),
        (_W4, WeightFormat("bfloat16")),
    )
    sizes = (  # T, N, I, E, K, J
        (0, 64, 64, 4, 2, 64),
        (1, 128, 64, 6, 3, 0),
        (7, 64, 192, 9, 2, 128),
        (45, 192, 64, 5, 3, 64),
    )
    for pair in formats:
        for size in sizes:
            # Integers only where the tolerance has room for a code that falls the other way.
            for dtype in (torch.bfloat16, torch.float32)[: 1 + (pair[0].name == "fp8")]:
                name = f"T, N, I, E, K, J = {list(size)}, {pair[0]} and {pair[1]}"
                yield Case(name, dtype, partial(_draw_experts, size, dtype, True, formats=pair))
        make = partial(_draw_experts, (40, 64, 64, 4, 1, 64), torch.bfloat16, True, formats=pair)
        name = f"all tokens to one expert, {pair[0]} and {pair[1]}"
        yield Case(name, torch.bfloat16, partial(make, only=2))


def _draw_experts(
    size: tuple[int, int, int, int, int, int],
    dtype: torch.dtype,
    fp32_combine: bool,
    generator: torch.Generator,
    *,
    only: int | None = None,
    formats: tuple[WeightFormat, WeightFormat] | None = None,
) -> Arguments:
    """Distinct experts a token; the last expert gets no token whenever E > K.

    formats: of the routed experts and of the shared one; None: plain tensors of the dtype.
    """
    tokens, hidden, inner, experts, top_k, shared = size
    candidates = experts - 1 if experts > top_k else experts
    keys = torch.rand((tokens, candidates), generator=generator)
    topk_ids = keys.argsort(dim=-1)[:, :top_k].int()
    if only is not None:
        topk_ids.fill_(only)

    def weight(*shape: int, shared: bool = False) -> torch.Tensor | WeightTensor:
        drawn = normal(generator, *shape, dtype=dtype, scale=1.5 * shape[-1] ** -0.5)
        return drawn if formats is None else quantize(drawn, formats[shared])

    return {
        "x": normal(generator, tokens, hidden, dtype=dtype),
        "routing": Routing(topk_ids, torch.rand((tokens, top_k), generator=generator) + 0.1),
        "experts": ExpertWeights(
            weight(experts, 2 * inner, hidden),
            weight(experts, hidden, inner),
            weight(2 * shared, hidden, shared=True) if shared else None,
            weight(hidden, shared, shared=True) if shared else None,
        ),
        "fp32_combine": fp32_combine,
    }


# Its results are sums of numbers rounded before: one of these may fall the other way.
_EXPERTS_TOL = {torch.bfloat16: (2.0**-7, 2.0**-6), torch.float16: (2.0**-10, 2.0**-9)}


@op(cases=_expert_cases, tol=_EXPERTS_TOL)
def moe_experts(
    x: torch.Tensor, routing: Routing, experts: ExpertWeights, fp32_combine: bool
) -> torch.Tensor:
    """sum_k weight_k * expert_k(x), plus the shared expert; expert(x) = down(silu(gate) * up).

    x: [T, N]. Returns [T, N] in x's dtype. gate and up are fp32, their product is rounded to x's
    dtype before down; the weighted sum runs in fp32 in order of choice. With a shared expert and
    fp32_combine both parts are added in fp32 and rounded once; without, each is rounded first.
    Source: HF's hy_v3 and qwen3_moe, which add in order of expert index, in x's dtype.
    """
    routed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    parts = x.new_empty((*routing.topk_ids.shape, x.shape[1]), dtype=torch.float32)
    for expert in routing.topk_ids.unique().tolist():
        token, choice = (routing.topk_ids == expert).nonzero(as_tuple=True)
        parts[token, choice] = _swiglu(
            x[token], _one(experts.gate_up_proj, expert), _one(experts.down_proj, expert)
        )
    for choice in range(routing.topk_ids.shape[1]):
        routed += parts[:, choice] * routing.topk_weights[:, choice, None]
    if experts.shared_gate_up_proj is None or experts.shared_down_proj is None:
        return routed.to(x.dtype)
    shared = _swiglu(x, experts.shared_gate_up_proj, experts.shared_down_proj)
    if not fp32_combine:
        routed, shared = routed.to(x.dtype).float(), shared.to(x.dtype).float()
    return (routed + shared).to(x.dtype)


def _one(stacked: torch.Tensor | WeightTensor, index: int) -> torch.Tensor | WeightTensor:
    return expert_of(stacked, index) if isinstance(stacked, WeightTensor) else stacked[index]


def _swiglu(
    x: torch.Tensor, gate_up: torch.Tensor | WeightTensor, down: torch.Tensor | WeightTensor
) -> torch.Tensor:
    """fp32 [T, N] result of one expert on x [T, N]."""
    gate, up = _product(x, gate_up).chunk(2, dim=-1)
    act = (gate * torch.sigmoid(gate) * up).to(x.dtype)
    return _product(act, down)


def _product(x: torch.Tensor, weight: torch.Tensor | WeightTensor) -> torch.Tensor:
    if isinstance(weight, WeightTensor):
        return linear(x, weight)
    return x.float() @ weight.float().T
