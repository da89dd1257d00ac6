"""ModelSpec of Hy3, Hy3-preview and Hy-MT2-30B-A3B (model_type hy_v3)."""

import logging

from moestro.core.config_reader import ConfigReader
from moestro.core.family_config import read_common
from moestro.core.model_spec import ModelSpec, MoeSpec

logger = logging.getLogger(__name__)

# transformers and the released checkpoints divide by the sum of the chosen scores plus this
RENORMALIZE_EPSILON = 1e-20
MAX_MTP_LAYERS = 16
_MOE_KINDS = {"dense": False, "sparse": True}


def read_hy_v3(config: ConfigReader) -> ModelSpec:
    """Read the keys of a hy_v3 config. Raises CheckpointError and UnsupportedError.

    Names differ between writers: expert_hidden_dim is moe_intermediate_size, num_local_experts
    is num_experts, and which layers are dense is said by first_k_dense_replace (the Hub) or
    mlp_layer_types (transformers). Where both stand they must agree.
    """
    common = read_common(config, config.integer("head_dim"))
    config.require("qk_norm", True, "query and key heads are normalised")
    for key in ("n_group", "topk_group"):
        config.require(key, 1, "experts are chosen without groups")
    # logits, softmax and router are fp32 whatever these hints say
    config.boolean("enable_lm_head_fp32", True)
    config.boolean("enable_attention_fp32_softmax", False)
    return ModelSpec(
        model_type="hy_v3",
        intermediate_size=config.integer("intermediate_size"),
        moe=_read_moe(config),
        moe_layers=_read_moe_layers(config, common.num_hidden_layers),
        num_mtp_layers=config.integer("num_nextn_predict_layers", 0, low=0, high=MAX_MTP_LAYERS),
        **common.as_fields(),
    )


def _read_moe(config: ConfigReader) -> MoeSpec:
    experts_key = config.alias("num_experts", "num_local_experts")
    num_experts = config.integer(experts_key)
    width_key = config.alias("moe_intermediate_size", "expert_hidden_dim")
    config.require("moe_router_use_sigmoid", True, "router scores are sigmoids")
    return MoeSpec(
        num_experts=num_experts,
        num_experts_per_tok=config.integer("num_experts_per_tok", high=num_experts),
        intermediate_size=config.integer(width_key),
        num_shared_experts=config.integer("num_shared_experts", low=0),
        scoring="sigmoid",
        has_expert_bias=config.boolean("moe_router_enable_expert_bias", True),
        renormalize=config.boolean("route_norm", True),
        renormalize_epsilon=RENORMALIZE_EPSILON,
        scaling=_read_scaling(config),
        # absent is false, as in the released checkpoints, although the class default of
        # transformers is true: its save_pretrained writes the key
        fp32_combine=config.boolean("enable_moe_fp32_combine", False),
    )


def _read_scaling(config: ConfigReader) -> float:
    if not config.has("router_scaling_factor"):
        logger.warning("%s has no router_scaling_factor: taking 1.0.", config.where)
    return config.number("router_scaling_factor", 1.0, low=0.0)


def _read_moe_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Which layers are MoE; the first one is dense when nothing is said."""
    num_dense = config.integer("first_k_dense_replace", 1, low=0, high=num_layers)
    by_count = tuple(i >= num_dense for i in range(num_layers))
    kinds = config.value("mlp_layer_types")
    if kinds is None:
        return by_count
    if not isinstance(kinds, list) or any(str(kind) not in _MOE_KINDS for kind in kinds):
        raise config.wrong("mlp_layer_types", 'must be a list of "dense" and "sparse"')
    if len(kinds) != num_layers:
        raise config.wrong(
            "mlp_layer_types",
            f"has {len(kinds)} entries; num_hidden_layers={num_layers} needs as many",
        )
    by_list = tuple(_MOE_KINDS[kind] for kind in kinds)
    if config.has("first_k_dense_replace") and by_list != by_count:
        raise config.wrong(
            "mlp_layer_types", f"contradicts first_k_dense_replace={num_dense}: keep one of them"
        )
    return by_list
