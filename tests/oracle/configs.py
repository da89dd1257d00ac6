"""The tiny configs that are compared with HF transformers; standard library and numpy only.

CONFIGS walks every axis on which the two families differ from each other and from their relatives;
`fresh_config` draws others. A config is a config.json as a dict.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OracleCase:
    """One config with the seed of its weights and prompts."""

    name: str
    config: Config
    seed: int


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LAYER_KINDS = ("dense", "sparse", "dense", "sparse")


def hy_v3(**changes: Any) -> Config:
    """A tiny Hy3 config; a change to None removes the key."""
    config: Config = {
        "architectures": ["HYV3ForCausalLM"],
        "model_type": "hy_v3",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "expert_hidden_dim": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_router_use_sigmoid": True,
        "moe_router_enable_expert_bias": True,
        "route_norm": True,
        "qk_norm": True,
        "router_scaling_factor": 2.826,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "enable_lm_head_fp32": True,
        "enable_moe_fp32_combine": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "bfloat16",
    }
    return _changed(config, changes)


def qwen3_moe(**changes: Any) -> Config:
    """A tiny Qwen3-MoE config; a change to None removes the key."""
    config: Config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "max_position_embeddings": 4096,
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    return _changed(config, changes)


def _changed(config: Config, changes: Config) -> Config:
    config.update(changes)
    return {k: v for k, v in config.items() if v is not None or k == "sliding_window"}


def _dense_layers(num_layers: int, dense: tuple[int, ...]) -> list[str]:
    return ["dense" if i in dense else "sparse" for i in range(num_layers)]


_HY_V3 = {
    "as_published": hy_v3(),
    "tied": hy_v3(tie_word_embeddings=True, vocab_size=101),
    "wide_heads": hy_v3(hidden_size=48, head_dim=32, num_attention_heads=4),
    "one_to_one": hy_v3(num_key_value_heads=4, enable_moe_fp32_combine=True),
    "sixteen_to_one": hy_v3(num_attention_heads=16, num_key_value_heads=1, head_dim=8),
    "many_experts": hy_v3(
        num_experts=192, num_experts_per_tok=8, moe_intermediate_size=16, expert_hidden_dim=16
    ),
    "four_experts_top_1": hy_v3(
        num_experts=4, num_experts_per_tok=1, expert_hidden_dim=None, router_scaling_factor=1.0
    ),
    "shared_experts": hy_v3(num_shared_experts=3, enable_moe_fp32_combine=True),
    "shared_experts_rounded": hy_v3(num_shared_experts=2, num_experts_per_tok=2),
    "all_dense": hy_v3(first_k_dense_replace=3, mlp_layer_types=["dense"] * 3),
    "all_sparse": hy_v3(
        first_k_dense_replace=0, mlp_layer_types=["sparse"] * 3, num_experts_per_tok=8
    ),
    "mixed": hy_v3(
        num_hidden_layers=4, first_k_dense_replace=None, mlp_layer_types=list(LAYER_KINDS)
    ),
    "yarn": hy_v3(rope_parameters=YARN, vocab_size=128),
    "yarn_old_spelling": hy_v3(
        rope_parameters=None,
        rope_theta=50000.0,
        rope_scaling={
            "type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 1.3,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "truncate": False,
        },
    ),
    "theta_old_spelling": hy_v3(
        rope_parameters=None,
        rope_theta=5000.0,
        head_dim=128,
        num_attention_heads=2,
        vocab_size=384,
    ),
}

_QWEN3_MOE = {
    "as_published": qwen3_moe(),
    "not_renormalized": qwen3_moe(norm_topk_prob=False),
    "tied": qwen3_moe(tie_word_embeddings=True, vocab_size=101),
    "wide_heads": qwen3_moe(hidden_size=48, head_dim=32),
    "one_to_one": qwen3_moe(num_key_value_heads=4, head_dim=24),
    "sixteen_to_one": qwen3_moe(num_attention_heads=16, num_key_value_heads=1, head_dim=8),
    "many_experts": qwen3_moe(num_experts=192, num_experts_per_tok=8, moe_intermediate_size=16),
    "four_experts_top_1": qwen3_moe(num_experts=4, num_experts_per_tok=1, norm_topk_prob=False),
    "mlp_only_layers": qwen3_moe(num_hidden_layers=4, mlp_only_layers=[0, 2]),
    "sparse_step": qwen3_moe(num_hidden_layers=4, decoder_sparse_step=2),
    "all_dense": qwen3_moe(mlp_only_layers=[0, 1, 2]),
    "published_tiny": qwen3_moe(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        decoder_sparse_step=2,
        tie_word_embeddings=True,
    ),
    "yarn": qwen3_moe(rope_parameters=YARN, vocab_size=128),
    "yarn_old_spelling": qwen3_moe(
        rope_parameters=None,
        rope_theta=1000000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
}

CONFIGS = tuple(
    OracleCase(f"{config['model_type']}-{name}", config, seed)
    for group in (_HY_V3, _QWEN3_MOE)
    for seed, (name, config) in enumerate(group.items(), start=1)
)


def fresh_config(model_type: str, seed: int) -> OracleCase:
    """A random config of the family."""
    rng = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    kv_heads = pick(1, 2, 4)
    layers = pick(2, 3, 4)
    width = pick(16, 24, 40)
    dense = tuple(i for i in range(layers) if pick(0, 0, 1))
    changes = {
        "vocab_size": pick(89, 128, 200),
        "hidden_size": pick(32, 48, 80),
        "intermediate_size": pick(40, 72),
        "moe_intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * pick(1, 2, 3, 8),
        "num_key_value_heads": kv_heads,
        "head_dim": pick(8, 16, 32, 64),
        "num_experts": pick(4, 10, 64),
        "num_experts_per_tok": pick(1, 2, 4),
        "tie_word_embeddings": pick(False, True),
        "rope_parameters": pick(YARN, {"rope_theta": 5e5, "rope_type": "default"}),
    }
    if model_type == "hy_v3":
        config = hy_v3(
            **changes,
            expert_hidden_dim=width,
            first_k_dense_replace=None,
            mlp_layer_types=_dense_layers(layers, dense),
            num_shared_experts=pick(1, 2),
            router_scaling_factor=pick(1.0, 2.5),
            enable_moe_fp32_combine=pick(False, True),
        )
    else:
        config = qwen3_moe(**changes, mlp_only_layers=list(dense), norm_topk_prob=pick(False, True))
    return OracleCase(f"{model_type}-fresh-{seed}", config, seed)
