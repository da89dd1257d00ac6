"""Running experts on the native library."""

import torch

from moestro import ops
from moestro.backends.cpu.arguments import DTYPE_CODES, MoeArgs
from moestro.backends.cpu.buffers import new_empty
from moestro.backends.cpu.launch import Kernel, launch
from moestro.ops.registry import implements
from moestro.quant.format import WeightTensor

_EXPERTS = Kernel("moe_experts")


def _fits(
    x: torch.Tensor, routing: ops.Routing, experts: ops.ExpertWeights, fp32_combine: bool
) -> bool:
    gate_up, down = _rows(experts.gate_up_proj), _rows(experts.down_proj)
    if gate_up is None or down is None:
        return False
    ids, weights = routing.topk_ids, routing.topk_weights
    if x.dim() != 2 or gate_up.dim() != 3 or x.dtype not in DTYPE_CODES:
        return False
    hidden, inner = x.shape[1], gate_up.shape[1] // 2
    return (
        gate_up.dtype in DTYPE_CODES
        and x.dtype in (gate_up.dtype, torch.float32)
        and down.dtype == gate_up.dtype
        and hidden > 0
        and inner > 0
        and gate_up.shape[1:] == (2 * inner, hidden)
        and down.shape == (gate_up.shape[0], hidden, inner)
        and ids.dtype == torch.int32
        and weights.dtype == torch.float32
        and ids.shape == weights.shape
        and ids.dim() == 2
        and ids.shape[0] == x.shape[0]
        and ids.shape[1] > 0
        and _fits_shared(experts, hidden)
    )


def _rows(weight: torch.Tensor | WeightTensor) -> torch.Tensor | None:
    """The float tensor of a weight that has one."""
    if isinstance(weight, torch.Tensor):
        return weight.contiguous()
    return None if weight.packed or not weight.format.is_float else weight.codes.contiguous()


def _fits_shared(experts: ops.ExpertWeights, hidden: int) -> bool:
    if experts.shared_gate_up_proj is None or experts.shared_down_proj is None:
        return True
    gate_up, down = _rows(experts.shared_gate_up_proj), _rows(experts.shared_down_proj)
    routed = _rows(experts.gate_up_proj)
    if gate_up is None or down is None or routed is None:
        return False
    inner = gate_up.shape[0] // 2
    return (
        gate_up.dtype == down.dtype == routed.dtype
        and gate_up.shape == (2 * inner, hidden)
        and down.shape == (hidden, inner)
        and inner > 0
    )


@implements(ops.moe_experts, devices=("cpu",), when=_fits, invariant=True)
def moe_experts(
    x: torch.Tensor, routing: ops.Routing, experts: ops.ExpertWeights, fp32_combine: bool
) -> torch.Tensor:
    x = x.contiguous()
    ids, weights = routing.topk_ids.contiguous(), routing.topk_weights.contiguous()
    gate_up, down = _rows(experts.gate_up_proj), _rows(experts.down_proj)
    shared_gate_up, shared_down = (
        None if w is None else _rows(w)
        for w in (experts.shared_gate_up_proj, experts.shared_down_proj)
    )
    assert gate_up is not None
    assert down is not None
    out = new_empty(tuple(x.shape), x.dtype)
    tokens, hidden = x.shape
    arguments = MoeArgs(
        x.data_ptr(),
        out.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        gate_up.data_ptr(),
        down.data_ptr(),
        None if shared_gate_up is None else shared_gate_up.data_ptr(),
        None if shared_down is None else shared_down.data_ptr(),
        tokens,
        hidden,
        down.shape[2],
        gate_up.shape[0],
        ids.shape[1],
        0 if shared_down is None else shared_down.shape[1],
        DTYPE_CODES[x.dtype],
        DTYPE_CODES[gate_up.dtype],
        fp32_combine,
        0,
    )
    held = [x, ids, weights, gate_up, down, out]
    held += [t for t in (shared_gate_up, shared_down) if t is not None]
    launch(_EXPERTS, arguments, *held)
    return out
