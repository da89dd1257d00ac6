"""The MoE block: fp32 routing in a bf16 model, and what the scaling factor scales."""

from dataclasses import replace

import pytest
import torch
from tests.fakes.parameters import tensors_of

import moestro.backends.cpu  # noqa: F401 -- registers the bodies
from moestro.core.model_spec import MoeSpec
from moestro.layers.moe import MoE
from moestro.layers.parameters import Parameters

SPEC = MoeSpec(
    num_experts=8,
    num_experts_per_tok=2,
    intermediate_size=16,
    num_shared_experts=1,
    scoring="sigmoid",
    has_expert_bias=True,
    renormalize=True,
    renormalize_epsilon=1e-20,
    scaling=2.826,
    fp32_combine=False,
)
HIDDEN = 32


def _layer(spec: MoeSpec, dtype: torch.dtype) -> MoE:
    return _made(spec, dtype)[0]


def _made(spec: MoeSpec, dtype: torch.dtype) -> tuple[MoE, dict[str, torch.Tensor]]:
    """The layer and its parameters by name."""
    parameters = Parameters(dtype)
    layer = MoE(parameters, spec, HIDDEN)
    generator = torch.Generator().manual_seed(2)
    for parameter in tensors_of(parameters.by_name).values():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return layer, tensors_of(parameters.by_name)


def _x(dtype: torch.dtype, count: int = 6) -> torch.Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(3)).to(dtype)


def test_router_and_bias_stay_fp32_in_a_bf16_model() -> None:
    _, tensors = _made(SPEC, torch.bfloat16)
    kept = {n for n, p in tensors.items() if p.dtype == torch.float32}
    assert kept == {"gate.weight", "expert_bias"}


def test_biases_closer_than_a_bf16_ulp_select_differently() -> None:
    layer = _layer(SPEC, torch.bfloat16)
    assert layer.expert_bias is not None
    layer.gate_weight.zero_()  # all scores are 0.5
    for best, second in ((3, 6), (6, 3)):
        bias = torch.full((8,), 0.5)
        bias[best], bias[second] = 0.5 + 2e-5, 0.5 + 1e-5
        assert len(bias.bfloat16().unique()) == 1
        layer.expert_bias.copy_(bias)
        assert layer.route(_x(torch.bfloat16)).topk_ids.tolist() == [[best, second]] * 6


def test_router_weights_closer_than_a_bf16_ulp_select_differently() -> None:
    layer = _layer(SPEC, torch.bfloat16)
    assert layer.expert_bias is not None
    layer.expert_bias.zero_()
    x = torch.ones((1, HIDDEN), dtype=torch.bfloat16)
    for best in (1, 5):
        weight = torch.full((8, HIDDEN), 0.03125)
        weight[best] += 1e-5
        assert len(weight.bfloat16().unique()) == 1
        layer.gate_weight.copy_(weight)
        assert layer.route(x).topk_ids[0, 0] == best


@pytest.mark.parametrize("fp32_combine", [False, True])
def test_scaling_factor_multiplies_the_routed_part_only(fp32_combine: bool) -> None:
    spec = replace(SPEC, fp32_combine=fp32_combine)
    x = _x(torch.float32)
    scaled, plain = (_layer(replace(spec, scaling=s), torch.float32) for s in (2.826, 1.0))
    assert plain.shared_experts is not None
    shared = plain.shared_experts(x)
    torch.testing.assert_close(scaled(x) - shared, 2.826 * (plain(x) - shared))


def test_routed_weights_sum_to_the_scaling_factor() -> None:
    weights = _layer(SPEC, torch.bfloat16).route(_x(torch.bfloat16)).topk_weights
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(dim=1), torch.full((6,), 2.826))


def test_layer_without_shared_expert_or_bias() -> None:
    spec = replace(SPEC, num_shared_experts=0, has_expert_bias=False, scoring="softmax")
    layer, tensors = _made(spec, torch.float32)
    assert set(tensors) == {
        "gate.weight",
        "experts.gate_up_proj",
        "experts.down_proj",
    }
    assert layer(_x(torch.float32)).shape == (6, HIDDEN)
