"""Fused ops as compositions of single ones, and a way to let them serve: rungs of the ladder.

A composition calls the device's own bodies for products, norms and activations and plain torch for
what lies between, in the fused op's order of arithmetic: the bits are the same, the passes over
memory and the calls are those of a model written without fused ops.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from moestro import ops
from moestro.errors import UnsupportedError
from moestro.ops.registry import Body, Op
from moestro.quant.format import WeightTensor
from moestro.quant.weight import expert as rows_of_expert


@contextmanager
def served_by(bodies: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within it, calls of the named ops go to these functions instead of the device's bodies."""
    changed: list[tuple[Op, list[Body]]] = []
    try:
        for name, fn in bodies.items():
            op: Op = getattr(ops, name)
            before = op.bodies.get("cpu", [])
            changed.append((op, before))
            op.bodies["cpu"] = [Body(f"bench.{fn.__name__}", "cpu", fn, None, True), *before]
        yield
    finally:
        for op, before in reversed(changed):
            op.bodies["cpu"] = before


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """An addition, then a norm."""
    summed = x + residual
    return ops.rms_norm(summed, weight, eps), summed


def qk_norm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A split, two norms, and rotations of halves."""
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, -1)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return (
        _rotate(q, q_weight, cos_sin, eps),
        _rotate(k, k_weight, cos_sin, eps),
        v.contiguous(),
    )


def _rotate(
    x: torch.Tensor, weight: torch.Tensor, cos_sin: torch.Tensor, eps: float
) -> torch.Tensor:
    normed = ops.rms_norm(x.float().contiguous(), weight.float(), eps)
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    first, second = normed.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rotary: ops.Rotary,
    eps: float,
    pages: ops.KVPages,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Rows of the rotary table, then qk_norm_rope, then the store."""
    if pages.hadamard:
        raise UnsupportedError("The ladder has no unfused Hadamard rotation: set kv_hadamard off.")
    dim, kv_heads = q_weight.shape[0], pages.k.shape[1]
    num_heads = qkv.shape[1] // dim - 2 * kv_heads
    cos_sin = rotary.table[rotary.positions]
    q, k, v = qk_norm_rope(qkv, q_weight, k_weight, cos_sin, eps, num_heads, kv_heads)
    ops.store_kv(k, v, pages, slot_mapping)
    return q


def moe_router(
    x: torch.Tensor,
    router: ops.RouterWeights,
    rule: ops.GatingRule,
    expert_counts: torch.Tensor | None = None,
) -> ops.Routing:
    """The router's product, then the choice, then the count."""
    logits = ops.router_logits(x, router)
    routing: ops.Routing = ops.moe_gating_top_k(logits, router.expert_bias, rule)
    if expert_counts is not None:
        chosen = routing.topk_ids.flatten().long()
        expert_counts += torch.bincount(chosen, minlength=expert_counts.numel())
    return routing


def moe_experts(
    x: torch.Tensor, routing: ops.Routing, experts: ops.ExpertWeights, fp32_combine: bool
) -> torch.Tensor:
    """A loop over the chosen experts: gather, two products and an activation each."""
    parts = x.new_empty((*routing.topk_ids.shape, x.shape[1]), dtype=torch.float32)
    for expert in routing.topk_ids.unique().tolist():
        token, choice = (routing.topk_ids == expert).nonzero(as_tuple=True)
        gate_up = one_expert(experts.gate_up_proj, expert)
        parts[token, choice] = _swiglu(x[token], gate_up, one_expert(experts.down_proj, expert))
    routed = torch.zeros(x.shape, dtype=torch.float32)
    for choice in range(routing.topk_ids.shape[1]):
        weights = routing.topk_weights[:, choice, None]
        # The kernel's fused multiply-add: in double the product is exact.
        routed = torch.addcmul(routed.double(), parts[:, choice].double(), weights.double()).float()
    if experts.shared_gate_up_proj is None or experts.shared_down_proj is None:
        return routed.to(x.dtype)
    shared = _swiglu(x, experts.shared_gate_up_proj, experts.shared_down_proj)
    if not fp32_combine:
        routed, shared = routed.to(x.dtype).float(), shared.to(x.dtype).float()
    return (routed + shared).to(x.dtype)


def one_expert(stacked: torch.Tensor | WeightTensor, index: int) -> torch.Tensor | WeightTensor:
    """One matrix of a stack: the packed layout gives each expert the same number of bytes."""
    if isinstance(stacked, torch.Tensor):
        return stacked[index]
    if not stacked.packed:
        return rows_of_expert(stacked, index)
    codes = stacked.codes.view(stacked.shape[0], -1)[index]
    return replace(stacked, shape=stacked.shape[1:], codes=codes)


def _swiglu(
    x: torch.Tensor, gate_up: torch.Tensor | WeightTensor, down: torch.Tensor | WeightTensor
) -> torch.Tensor:
    act = ops.silu_and_mul(ops.linear(x, gate_up, torch.float32)).to(x.dtype)
    y: torch.Tensor = ops.linear(act, down, torch.float32)
    return y


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (add_rms_norm, qk_norm_rope_store, moe_router)
}
"""Fused chains as single steps."""
LOOP: dict[str, Callable[..., Any]] = {"moe_experts": moe_experts}
"""The fused MoE block as a loop over experts."""
