"""Choosing experts on the native library."""

import torch

from moestro import ops
from moestro.backends.cpu.arguments import DTYPE_CODES, GatingArgs, RouterArgs
from moestro.backends.cpu.buffers import new_empty
from moestro.backends.cpu.launch import Kernel, launch
from moestro.ops.registry import implements
from moestro.ops.routing import split_weight

_GATING, _ROUTER = Kernel("moe_gating_top_k"), Kernel("moe_router")
_MAX_EXPERTS = 4096
_PANEL = 32
_SCORINGS = ("sigmoid", "softmax")


def pack_router(router: ops.RouterWeights) -> ops.RouterWeights:
    """The same weights with the layout that csrc/kernels/router.inl reads.

    Panels of 32 experts, zeros in the last one's gaps; in a panel k (terms 0) or pairs of k, for
    each of them every term, for each of these all experts.
    """
    weight = router.weight
    experts, hidden = weight.shape
    panels = -(-experts // _PANEL)
    high_low = (weight,) if router.terms == 0 else split_weight(weight)[: router.terms]
    pair = 1 if router.terms == 0 else 2
    steps = -(-hidden // pair)
    shape = (panels * _PANEL, steps * pair)
    packed = torch.empty(
        (panels, steps, len(high_low), _PANEL, pair), dtype=high_low[0].dtype, device=weight.device
    )
    for term, rows in enumerate(high_low):
        padded = rows.new_zeros(shape)
        padded[:experts, :hidden] = rows
        packed[:, :, term] = padded.view(panels, _PANEL, steps, pair).transpose(1, 2)
    bias = router.expert_bias
    bias = None if bias is None else bias.float().contiguous()
    return ops.RouterWeights(weight, bias, router.terms, packed.view(torch.uint8).flatten())


def _fits_gating(
    router_logits: torch.Tensor, expert_bias: torch.Tensor | None, rule: ops.GatingRule
) -> bool:
    experts = router_logits.shape[-1]
    return (
        router_logits.dim() == 2
        and router_logits.dtype == torch.float32
        and 0 < rule.top_k <= experts <= _MAX_EXPERTS
        and rule.scoring in _SCORINGS
        and (expert_bias is None or expert_bias.shape == (experts,))
    )


@implements(ops.moe_gating_top_k, devices=("cpu",), when=_fits_gating, invariant=True)
def moe_gating_top_k(
    router_logits: torch.Tensor, expert_bias: torch.Tensor | None, rule: ops.GatingRule
) -> ops.Routing:
    logits = router_logits.contiguous()
    bias = None if expert_bias is None else expert_bias.float().contiguous()
    tokens, experts = logits.shape
    topk_ids = new_empty((tokens, rule.top_k), torch.int32)
    topk_weights = new_empty((tokens, rule.top_k), torch.float32)
    arguments = GatingArgs(
        logits.data_ptr(),
        None if bias is None else bias.data_ptr(),
        topk_ids.data_ptr(),
        topk_weights.data_ptr(),
        tokens,
        experts,
        rule.top_k,
        rule.epsilon,
        rule.scaling,
        rule.scoring == "softmax",
        rule.renormalize,
    )
    held = (logits, topk_ids, topk_weights)
    launch(_GATING, arguments, *held, *(() if bias is None else (bias,)))
    return ops.Routing(topk_ids, topk_weights)


def _fits_router(x: torch.Tensor, router: ops.RouterWeights) -> bool:
    weight, bias = router.weight, router.expert_bias
    return (
        x.dim() == 2
        and x.dtype in DTYPE_CODES
        and (router.terms == 0 or x.dtype == torch.bfloat16)
        and weight.shape == (weight.shape[0], x.shape[1])
        and 0 < weight.shape[0] <= _MAX_EXPERTS
        and x.shape[1] > 0
        and (bias is None or bias.shape == (weight.shape[0],))
    )


def _fits_choice(
    x: torch.Tensor,
    router: ops.RouterWeights,
    rule: ops.GatingRule,
    expert_counts: torch.Tensor | None = None,
) -> bool:
    return (
        _fits_router(x, router)
        and 0 < rule.top_k <= router.weight.shape[0]
        and rule.scoring in _SCORINGS
        and (
            expert_counts is None
            or (
                expert_counts.dtype == torch.int64
                and expert_counts.shape == router.weight.shape[:1]
                and expert_counts.is_contiguous()
            )
        )
    )


@implements(ops.router_logits, devices=("cpu",), when=_fits_router, invariant=True)
def router_logits(x: torch.Tensor, router: ops.RouterWeights) -> torch.Tensor:
    x = x.contiguous()
    packed = router if router.packed is not None else pack_router(router)
    assert packed.packed is not None
    experts = router.weight.shape[0]
    logits = new_empty((x.shape[0], experts), torch.float32)
    arguments = RouterArgs(
        x=x.data_ptr(),
        weight=packed.packed.data_ptr(),
        logits=logits.data_ptr(),
        num_tokens=x.shape[0],
        hidden=x.shape[1],
        num_experts=experts,
        x_dtype=DTYPE_CODES[x.dtype],
        terms=router.terms,
    )
    launch(_ROUTER, arguments, x, packed.packed, logits)
    return logits


@implements(ops.moe_router, devices=("cpu",), when=_fits_choice, invariant=True)
def moe_router(
    x: torch.Tensor,
    router: ops.RouterWeights,
    rule: ops.GatingRule,
    expert_counts: torch.Tensor | None = None,
) -> ops.Routing:
    x = x.contiguous()
    if router.packed is None:
        router = pack_router(router)
    packed, bias = router.packed, router.expert_bias
    assert packed is not None
    tokens, experts = x.shape[0], router.weight.shape[0]
    topk_ids = new_empty((tokens, rule.top_k), torch.int32)
    topk_weights = new_empty((tokens, rule.top_k), torch.float32)
    arguments = RouterArgs(
        x.data_ptr(),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if expert_counts is None else expert_counts.data_ptr(),
        None,
        topk_ids.data_ptr(),
        topk_weights.data_ptr(),
        tokens,
        x.shape[1],
        experts,
        rule.top_k,
        rule.epsilon,
        rule.scaling,
        rule.scoring == "softmax",
        rule.renormalize,
        DTYPE_CODES[x.dtype],
        router.terms,
    )
    held = [t for t in (bias, expert_counts) if t is not None]
    launch(_ROUTER, arguments, x, packed, topk_ids, topk_weights, *held)
    return ops.Routing(topk_ids, topk_weights)
