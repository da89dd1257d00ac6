"""What build_model allocates."""

import pytest
import torch
from tests.fakes.parameters import tensors_of
from tests.oracle.configs import Config, hy_v3, qwen3_moe

from moestro.core.model_config import parse_model_config
from moestro.errors import UnsupportedError
from moestro.layers.parameters import Parameters
from moestro.models.registry import build_model

HY3 = hy_v3(
    vocab_size=120832,
    hidden_size=4096,
    intermediate_size=13312,
    moe_intermediate_size=1536,
    expert_hidden_dim=1536,
    num_hidden_layers=80,
    num_nextn_predict_layers=1,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    num_experts=192,
    num_experts_per_tok=8,
    bos_token_id=120000,
    eos_token_id=120025,
)
QWEN3_235B = qwen3_moe(
    vocab_size=151936,
    hidden_size=4096,
    moe_intermediate_size=1536,
    num_hidden_layers=94,
    num_attention_heads=64,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
)


def _shapes(config: Config) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    model = build_model(parse_model_config(config), Parameters(torch.bfloat16))
    return {name: (tuple(p.shape), p.dtype) for name, p in tensors_of(model.weights).items()}


def test_names_shapes_and_dtypes_of_hy_v3() -> None:
    low, full = torch.bfloat16, torch.float32

    def common(layer: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            f"{layer}.input_layernorm.weight": ((64,), low),
            f"{layer}.post_attention_layernorm.weight": ((64,), low),
            f"{layer}.self_attn.qkv_proj.weight": ((8 * 16, 64), low),
            f"{layer}.self_attn.o_proj.weight": ((64, 64), low),
            f"{layer}.self_attn.q_norm.weight": ((16,), low),
            f"{layer}.self_attn.k_norm.weight": ((16,), low),
        }

    def experts(layer: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            **common(layer),
            f"{layer}.mlp.gate.weight": ((16, 64), full),
            f"{layer}.mlp.expert_bias": ((16,), full),
            f"{layer}.mlp.experts.gate_up_proj": ((16, 64, 64), low),
            f"{layer}.mlp.experts.down_proj": ((16, 64, 32), low),
            f"{layer}.mlp.shared_experts.gate_up_proj.weight": ((2 * 96, 64), low),
            f"{layer}.mlp.shared_experts.down_proj.weight": ((64, 96), low),
        }

    assert _shapes(
        hy_v3(num_hidden_layers=2, num_shared_experts=3, num_nextn_predict_layers=1)
    ) == {
        "model.embed_tokens.weight": ((96, 64), low),
        "model.norm.weight": ((64,), low),
        "lm_head.weight": ((96, 64), low),
        **common("model.layers.0"),
        "model.layers.0.mlp.gate_up_proj.weight": ((192, 64), low),
        "model.layers.0.mlp.down_proj.weight": ((64, 96), low),
        **experts("model.layers.1"),
        **experts("model.layers.2"),
        "model.layers.2.enorm.weight": ((64,), low),
        "model.layers.2.hnorm.weight": ((64,), low),
        "model.layers.2.eh_proj.weight": ((64, 128), low),
        "model.layers.2.final_layernorm.weight": ((64,), low),
    }


def test_qwen3_moe_has_no_bias_no_shared_expert_and_may_tie() -> None:
    shapes = _shapes(qwen3_moe(num_hidden_layers=1, tie_word_embeddings=True))
    assert {n for n in shapes if not n.startswith("model.layers.0.self_attn")} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
    }
    assert shapes["model.layers.0.mlp.gate.weight"][1] == torch.float32


@pytest.mark.parametrize(
    ("config", "trunk", "mtp"),
    [(HY3, 295_033_543_488, 3_752_612_288), (QWEN3_235B, 235_093_634_560, 0)],
    ids=["Hy3", "Qwen3-235B-A22B"],
)
def test_published_sizes_are_allocated_exactly(config: Config, trunk: int, mtp: int) -> None:
    spec = parse_model_config(config)
    for layers, expected in ((None, trunk + mtp), (0, trunk)):
        model = build_model(spec, Parameters(torch.bfloat16, device="meta"), layers)
        assert sum(p.numel() for p in tensors_of(model.weights).values()) == expected
    assert (spec.num_parameters, spec.num_mtp_parameters) == (trunk, mtp)


def test_impossible_requests_are_refused() -> None:
    spec = parse_model_config(qwen3_moe())
    for count in (1, -1):
        with pytest.raises(UnsupportedError, match=r"num_mtp_layers must be in \[0, 0\]"):
            build_model(spec, Parameters(torch.float32), num_mtp_layers=count)
