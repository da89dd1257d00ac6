"""Mixture of experts: the router, which chooses the experts of each token."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from moestro.ops.registry import op
from moestro.ops.testing import FLOAT_DTYPES, Arguments, Case, normal

LOW_SCALE = 256.0
"""What W_low is stored times. bf16 has fp32's exponents, so it changes no bit of a weight above
2^-110; below, it keeps the low part out of the subnormal numbers."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Experts of each token in order of choice: topk_ids [T, K] int32, topk_weights [T, K] fp32."""

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """A router: weight [E, N] fp32, expert_bias [E] fp32 or None, and how the weight is used.

    terms: bf16 numbers that stand for a weight: 0 (the fp32 weight itself), 1 (W_high =
    bf16(W)), 2 (W_high and W_low = bf16(256 (W - W_high)), which differ from W by at most
    2^-17 |W|). packed: the same in the device's layout; made at each call where it is missing.
    """

    weight: torch.Tensor
    expert_bias: torch.Tensor | None = None
    terms: int = 0
    packed: torch.Tensor | None = None

    @classmethod
    def of(
        cls, weight: torch.Tensor, expert_bias: torch.Tensor | None, dtype: torch.dtype
    ) -> "RouterWeights":
        """For activations of `dtype`: bf16 terms for bf16, as few as hold the weight; else fp32."""
        return cls(weight, expert_bias, _terms(weight, dtype))


@dataclass(frozen=True, slots=True)
class GatingRule:
    """How top_k experts a token are chosen from logits, and what their outputs weigh.

    scoring: sigmoid or softmax over all experts. Weights are the scores of the chosen, divided by
    (their sum + epsilon) when renormalize, times scaling.
    """

    top_k: int
    scoring: str
    renormalize: bool
    epsilon: float
    scaling: float


def _terms(weight: torch.Tensor, dtype: torch.dtype) -> int:
    if dtype != torch.bfloat16:
        return 0
    return 1 if torch.equal(weight.bfloat16().float(), weight) else 2


def split_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(W_high, W_low), both bf16; W_low is 0 where W_high is not finite."""
    high = weight.bfloat16()
    low = (LOW_SCALE * (weight - high.float())).bfloat16()
    return high, torch.where(high.isfinite(), low, torch.zeros_like(low))


def _gating_cases() -> Iterator[Case]:
    for scoring in ("sigmoid", "softmax"):
        for renormalize in (True, False):
            for tokens, experts, top_k in ((0, 8, 2), (1, 4, 1), (3, 192, 8), (70, 16, 16)):
                name = f"{scoring}, renormalize {renormalize}, {top_k} of {[tokens, experts]}"
                make = partial(_draw_gating, (tokens, experts, top_k), scoring, renormalize)
                yield Case(name, torch.float32, make)
        for bias in (None, "large", "below a bf16 ulp"):
            make = partial(_draw_gating, (40, 24, 4), scoring, True, bias=bias)
            yield Case(f"{scoring}, bias {bias}", torch.float32, make)
            yield Case(f"{scoring}, ties, bias {bias}", torch.float32, partial(make, ties=True))


def _draw_gating(
    size: tuple[int, int, int],
    scoring: str,
    renormalize: bool,
    generator: torch.Generator,
    *,
    bias: str | None = "large",
    ties: bool = False,
) -> Arguments:
    """size: T, E, K. ties: few distinct logits, and pairs of experts with one bias."""
    tokens, experts, top_k = size
    logits = torch.randn((tokens, experts), generator=generator) * 2
    expert_bias = None
    if bias == "large":
        expert_bias = torch.randn(experts, generator=generator)
    elif bias is not None:
        logits = logits[:, :1].expand(-1, experts).contiguous()
        expert_bias = 0.5 + torch.randperm(experts, generator=generator) * 1e-5
    if ties:
        logits = logits.round()
        if expert_bias is not None:
            expert_bias = expert_bias[torch.arange(experts) // 2 * 2]
    return {
        "router_logits": logits,
        "expert_bias": expert_bias,
        "rule": _rule_of_family(top_k, scoring, renormalize=renormalize),
    }


def _rule_of_family(top_k: int, scoring: str, *, renormalize: bool) -> GatingRule:
    epsilon, scaling = (1e-20, 2.826) if scoring == "sigmoid" else (0.0, 1.0)
    return GatingRule(top_k, scoring, renormalize, epsilon, scaling)


@op(cases=_gating_cases)
def moe_gating_top_k(
    router_logits: torch.Tensor, expert_bias: torch.Tensor | None, rule: GatingRule
) -> Routing:
    """Choose rule.top_k experts a token.

    router_logits: [T, E] fp32; expert_bias: [E] fp32, added to the scores for the selection only:
    weights are those of the unbiased scores. Order: falling biased score, ties to the lowest index.
    Source: HF's hy_v3 (sigmoid) and qwen3_moe (softmax).
    """
    logits = router_logits.float()
    sigmoid = rule.scoring == "sigmoid"
    scores = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, dim=-1)
    keys = scores if expert_bias is None else scores + expert_bias.float()
    topk_ids = keys.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
    weights = scores.gather(1, topk_ids)
    if rule.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + rule.epsilon)
    return Routing(topk_ids.int(), weights * rule.scaling)


def _draw_router(
    size: tuple[int, int, int], dtype: torch.dtype, exact: bool, generator: torch.Generator
) -> Arguments:
    """size: T, N, E. exact: the weight is made of bf16 numbers."""
    tokens, hidden, experts = size
    weight = torch.randn((experts, hidden), generator=generator) * hidden**-0.5
    if exact:
        weight = weight.bfloat16().float()
    return {
        "x": normal(generator, tokens, hidden, dtype=dtype),
        "router": RouterWeights.of(weight, torch.randn(experts, generator=generator), dtype),
    }


_ROUTER_SIZES = (  # T, N, E
    (0, 16, 4),
    (1, 1, 1),
    (1, 600, 192),
    (3, 33, 5),
    (70, 1025, 40),
    (200, 64, 33),
)


def _router_cases(*, counted: bool) -> Iterator[Case]:
    for dtype in FLOAT_DTYPES:
        for size in _ROUTER_SIZES:
            for exact in (True, False):
                name = f"T, N, E = {list(size)}, {'bf16' if exact else 'fp32'} weight"
                if not counted:
                    yield Case(name, dtype, partial(_draw_router, size, dtype, exact))
                    continue
                for scoring in ("sigmoid", "softmax"):
                    make = partial(_draw_choice, size, dtype, exact, scoring)
                    yield Case(f"{name}, {scoring}", dtype, make)


def _draw_choice(
    size: tuple[int, int, int],
    dtype: torch.dtype,
    exact: bool,
    scoring: str,
    generator: torch.Generator,
) -> Arguments:
    arguments = _draw_router(size, dtype, exact, generator)
    experts = size[2]
    counts = torch.randint(2**40, (experts,), generator=generator) if exact else None
    rule = _rule_of_family(min(8, experts), scoring, renormalize=scoring == "sigmoid")
    return {**arguments, "rule": rule, "expert_counts": counts}


# A result is fp32 whatever x is.
_ROUTER_TOL = dict.fromkeys(FLOAT_DTYPES, (1e-5, 1e-5))


@op(cases=partial(_router_cases, counted=False), tol=_ROUTER_TOL)
def router_logits(x: torch.Tensor, router: RouterWeights) -> torch.Tensor:
    """The router's logits, [T, E] fp32: x times the weight's rows, summed in fp32.

    x: [T, N]. With terms 2: x W_high^T + (x W_low^T) / 256. Operands are never rounded: x is used
    as it is, the weight as RouterWeights says. A logit has the same bits in moe_router. Against the
    weight itself it is off by at most (2^-17 + N 2^-24) sum_k |x_k| |w_k|. At AVX-512 bf16 products
    below 2^-126 count as zero. Source: Tencent's hpc-ops, gemm_bf16xfp32.
    """
    wide = x.float()
    if router.terms == 0:
        return wide @ router.weight.T
    high, low = (part.float() for part in split_weight(router.weight))
    logits = wide @ high.T
    return logits if router.terms == 1 else logits + (wide @ low.T) / LOW_SCALE


@op(cases=partial(_router_cases, counted=True), tol=_ROUTER_TOL, mutates=("expert_counts",))
def moe_router(
    x: torch.Tensor,
    router: RouterWeights,
    rule: GatingRule,
    expert_counts: torch.Tensor | None = None,
) -> Routing:
    """Choose the experts of each token from its hidden state, in one pass.

    x: [T, N]. moe_gating_top_k of router_logits with router.expert_bias and the rule.
    expert_counts: [E] int64, to which the number of tokens that chose each expert is added.
    Source: HF's hy_v3 and qwen3_moe with an fp32 router.
    """
    routing: Routing = moe_gating_top_k.reference(
        router_logits.reference(x, router), router.expert_bias, rule
    )
    if expert_counts is not None:
        chosen = routing.topk_ids.flatten().long()
        expert_counts += torch.bincount(chosen, minlength=expert_counts.numel())
    return routing
