"""The mixture-of-experts block: fp32 router, chosen experts, shared expert."""

import torch
from torch import nn

from moestro import ops
from moestro.backends.base import Device
from moestro.core.model_spec import MoeSpec
from moestro.layers.mlp import MLP
from moestro.layers.parameters import Parameters


class Experts(nn.Module):
    """Stacked routed experts: gate_up_proj [E, 2 I, N], gate rows first; down_proj [E, N, I]."""

    def __init__(self, parameters: Parameters, moe: MoeSpec, hidden_size: int) -> None:
        super().__init__()
        experts, inner = moe.num_experts, moe.intermediate_size
        self.gate_up_proj = parameters.weight(
            "gate_up_proj", experts, 2 * inner, hidden_size, paired=True
        )
        self.down_proj = parameters.weight("down_proj", experts, hidden_size, inner)


class MoE(nn.Module):
    """Routes each token to its experts and adds the shared one.

    The router's weight and the expert bias are fp32 whatever the model's dtype is: rounded to
    bf16 they choose other experts. expert_counts: [E] int64, where given the number of tokens that
    chose each expert is added to it.
    """

    def __init__(self, parameters: Parameters, moe: MoeSpec, hidden_size: int) -> None:
        super().__init__()
        self.moe = moe
        self.gate_weight = parameters.tensor(
            "gate.weight", moe.num_experts, hidden_size, dtype=torch.float32
        )
        self.expert_bias: torch.Tensor | None = None
        if moe.has_expert_bias:
            self.expert_bias = parameters.tensor(
                "expert_bias", moe.num_experts, dtype=torch.float32
            )
        self._router: ops.RouterWeights | None = None
        self.expert_counts: torch.Tensor | None = None
        self.gating_rule = ops.GatingRule(
            moe.num_experts_per_tok,
            moe.scoring,
            moe.renormalize,
            moe.renormalize_epsilon,
            moe.scaling,
        )
        self.experts = Experts(parameters.within("experts"), moe, hidden_size)
        self.shared_experts: MLP | None = None
        if moe.num_shared_experts:
            inner = parameters.within("shared_experts")
            self.shared_experts = MLP(inner, hidden_size, moe.shared_intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, N] to [T, N]."""
        routing = self.route(x)
        y: torch.Tensor = ops.moe_experts(x, routing, self._weights(), self.moe.fp32_combine)
        return y

    def route(self, x: torch.Tensor) -> ops.Routing:
        """The experts of each token and their weights, decided in fp32; counts them."""
        routing: ops.Routing = ops.moe_router(
            x, self.router(x.dtype), self.gating_rule, self.expert_counts
        )
        return routing

    def router(self, dtype: torch.dtype) -> ops.RouterWeights:
        """The router for activations of `dtype`: packed, or as it is before pack_router."""
        return self._router or ops.RouterWeights.of(self.gate_weight, self.expert_bias, dtype)

    def pack_router(self, device: Device, dtype: torch.dtype) -> None:
        """Lay the router out for activations of `dtype`; to be called once the weight is filled."""
        plain = ops.RouterWeights.of(self.gate_weight, self.expert_bias, dtype)
        self._router = device.pack_router(plain)

    def _weights(self) -> ops.ExpertWeights:
        routed, shared = self.experts, self.shared_experts
        if shared is None:
            return ops.ExpertWeights(routed.gate_up_proj, routed.down_proj)
        return ops.ExpertWeights(
            routed.gate_up_proj,
            routed.down_proj,
            shared.gate_up_proj.weight,
            shared.down_proj.weight,
        )


def moe_layers(model: nn.Module) -> dict[int, MoE]:
    """The MoE blocks of model.layers.<number>.mlp by that number, in order."""
    return {
        next(int(part) for part in name.split(".") if part.isdecimal()): module
        for name, module in model.named_modules()
        if isinstance(module, MoE)
    }


def pack_routers(model: nn.Module, device: Device, dtype: torch.dtype) -> None:
    """Lay out the router of every MoE layer; to be called once the weights are filled."""
    for module in moe_layers(model).values():
        module.pack_router(device, dtype)
