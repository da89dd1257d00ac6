"""Running experts on the native library."""

import torch

from moestro import ops
from moestro.backends.cpu.arguments import DTYPE_CODES, MoeArgs
from moestro.backends.cpu.buffers import new_empty
from moestro.backends.cpu.launch import Kernel, launch
from moestro.backends.cpu.linear import packed_form, takes_weight
from moestro.backends.cpu.packing import NO_WEIGHT, describe
from moestro.ops.registry import implements
from moestro.quant.format import WeightTensor

_EXPERTS = Kernel("moe_experts")


def _fits(
    x: torch.Tensor, routing: ops.Routing, experts: ops.ExpertWeights, fp32_combine: bool
) -> bool:
    ids, weights = routing.topk_ids, routing.topk_weights
    gate_up, down = experts.gate_up_proj, experts.down_proj
    shared_gate_up, shared_down = experts.shared_gate_up_proj, experts.shared_down_proj
    return (
        x.dim() == 2
        and x.dtype in DTYPE_CODES
        and ids.dtype == torch.int32
        and weights.dtype == torch.float32
        and ids.shape == weights.shape
        and ids.dim() == 2
        and ids.shape[0] == x.shape[0]
        and ids.shape[1] > 0
        and len(gate_up.shape) == 3
        and _fit_each_other(x, gate_up, down, tuple(gate_up.shape[:1]))
        and (
            shared_gate_up is None
            or shared_down is None
            or _fit_each_other(x, shared_gate_up, shared_down, ())
        )
    )


def _fit_each_other(
    x: torch.Tensor,
    gate_up: torch.Tensor | WeightTensor,
    down: torch.Tensor | WeightTensor,
    stacked: tuple[int, ...],
) -> bool:
    hidden, inner = x.shape[1], down.shape[-1]
    return (
        hidden > 0
        and inner > 0
        and tuple(gate_up.shape) == (*stacked, 2 * inner, hidden)
        and tuple(down.shape) == (*stacked, hidden, inner)
        and takes_weight(x.dtype, gate_up)
        and takes_weight(x.dtype, down)
        and (isinstance(gate_up, torch.Tensor) or gate_up.paired or not gate_up.packed)
    )


@implements(ops.moe_experts, devices=("cpu",), when=_fits, invariant=True)
def moe_experts(
    x: torch.Tensor, routing: ops.Routing, experts: ops.ExpertWeights, fp32_combine: bool
) -> torch.Tensor:
    x, ids, weights = (
        t if t.is_contiguous() else t.contiguous()
        for t in (x, routing.topk_ids, routing.topk_weights)
    )
    held = [
        packed_form(experts.gate_up_proj, paired=True),
        packed_form(experts.down_proj, paired=False),
    ]
    if experts.shared_gate_up_proj is not None and experts.shared_down_proj is not None:
        held.append(packed_form(experts.shared_gate_up_proj, paired=True))
        held.append(packed_form(experts.shared_down_proj, paired=False))
    out = new_empty(tuple(x.shape), x.dtype)
    described = [describe(weight) for weight in held]
    arguments = MoeArgs(
        x.data_ptr(),
        out.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        *described,
        *[NO_WEIGHT] * (4 - len(described)),
        x.shape[0],
        ids.shape[1],
        DTYPE_CODES[x.dtype],
        fp32_combine,
    )
    launch(_EXPERTS, arguments, x, ids, weights, out, *(weight.codes for weight in held))
    return out
