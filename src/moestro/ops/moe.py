"""Mixture of experts: choosing experts, and running them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moestro.ops.registry import op
from moestro.ops.testing import Case


@dataclass(frozen=True, slots=True)
class Routing:
    """Experts of each token in order of choice: topk_ids [T, K] int32, topk_weights [T, K] fp32."""

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Stacked SwiGLU experts and the shared one, if any.

    gate_up_proj: [E, 2 I, N], gate rows first; down_proj: [E, N, I];
    shared_gate_up_proj: [2 J, N]; shared_down_proj: [N, J].
    """

    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    shared_gate_up_proj: torch.Tensor | None = None
    shared_down_proj: torch.Tensor | None = None


def _cases() -> Iterator[Case]:
    yield from ()


@op(cases=_cases)
def moe_gating_top_k(
    router_logits: torch.Tensor,
    expert_bias: torch.Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    epsilon: float,
    scaling: float,
) -> Routing:
    """Choose top_k experts a token.

    router_logits: [T, E] fp32; expert_bias: [E] fp32, added for the selection only; scoring:
    sigmoid or softmax over all experts. Weights are the unbiased scores of the chosen, divided by
    (their sum + epsilon) when renormalize, times scaling. Order: falling biased score, ties to the
    lowest index. Source: HF's hy_v3 (sigmoid) and qwen3_moe (softmax).
    """
    logits = router_logits.float()
    scores = torch.sigmoid(logits) if scoring == "sigmoid" else torch.softmax(logits, dim=-1)
    keys = scores if expert_bias is None else scores + expert_bias.float()
    topk_ids = keys.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, topk_ids)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + epsilon)
    return Routing(topk_ids.int(), weights * scaling)


@op(cases=_cases)
def moe_experts(
    x: torch.Tensor, routing: Routing, experts: ExpertWeights, fp32_combine: bool
) -> torch.Tensor:
    """sum_k weight_k * expert_k(x), plus the shared expert; expert(x) = down(silu(gate) * up).

    x: [T, N]. Returns [T, N] in x's dtype. gate and up are fp32, their product is rounded to x's
    dtype before down; the weighted sum runs in fp32 in order of choice. With a shared expert and
    fp32_combine both parts are added in fp32 and rounded once; without, each is rounded first.
    """
    routed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    parts = x.new_empty((*routing.topk_ids.shape, x.shape[1]), dtype=torch.float32)
    for expert in routing.topk_ids.unique().tolist():
        token, choice = (routing.topk_ids == expert).nonzero(as_tuple=True)
        parts[token, choice] = _swiglu(
            x[token], experts.gate_up_proj[expert], experts.down_proj[expert]
        )
    for choice in range(routing.topk_ids.shape[1]):
        routed += parts[:, choice] * routing.topk_weights[:, choice, None]
    if experts.shared_gate_up_proj is None or experts.shared_down_proj is None:
        return routed.to(x.dtype)
    shared = _swiglu(x, experts.shared_gate_up_proj, experts.shared_down_proj)
    if not fp32_combine:
        routed, shared = routed.to(x.dtype).float(), shared.to(x.dtype).float()
    return (routed + shared).to(x.dtype)


def _swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """fp32 [T, N] result of one expert on x [T, N]."""
    gate, up = (x.float() @ gate_up.float().T).chunk(2, dim=-1)
    act = (gate * torch.sigmoid(gate) * up).to(x.dtype)
    return act.float() @ down.float().T
