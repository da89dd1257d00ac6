"""ModelSpec of Qwen3-30B-A3B, 235B-A22B and Coder (model_type qwen3_moe)."""

from moestro.core.config_reader import ConfigReader
from moestro.core.family_config import read_common
from moestro.core.model_spec import ModelSpec, MoeSpec


def read_qwen3_moe(config: ConfigReader) -> ModelSpec:
    """Read the keys of a qwen3_moe config. Raises CheckpointError and UnsupportedError.

    A layer is MoE unless mlp_only_layers names it or decoder_sparse_step skips it. Widths that no
    layer uses may be absent.
    """
    common = read_common(config, _read_head_dim(config))
    config.require("use_qk_norm", True, "query and key heads are normalised")
    config.require("shared_expert_intermediate_size", 0, "there is no shared expert")
    config.require("num_nextn_predict_layers", 0, "there is no MTP layer")
    num_experts = config.integer(config.alias("num_experts", "num_local_experts"), low=0)
    moe_layers = _read_moe_layers(config, common.num_hidden_layers, num_experts)
    uses_dense = not all(moe_layers)
    for key in ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"):
        config.has(key)  # known, even when every layer is dense and none is used
    return ModelSpec(
        model_type="qwen3_moe",
        intermediate_size=config.integer("intermediate_size", None if uses_dense else 0, low=0),
        moe=_read_moe(config, num_experts) if any(moe_layers) else None,
        moe_layers=moe_layers,
        num_mtp_layers=0,
        **common.as_fields(),
    )


def _read_head_dim(config: ConfigReader) -> int:
    """Explicit, or hidden_size / num_attention_heads: transformers does not always write it."""
    if config.has("head_dim"):
        return config.integer("head_dim")
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    if hidden % heads:
        raise config.wrong(
            "num_attention_heads",
            f"does not divide hidden_size={hidden}, and there is no head_dim",
        )
    return hidden // heads


def _read_moe(config: ConfigReader, num_experts: int) -> MoeSpec:
    return MoeSpec(
        num_experts=num_experts,
        num_experts_per_tok=config.integer("num_experts_per_tok", high=num_experts),
        intermediate_size=config.integer("moe_intermediate_size"),
        num_shared_experts=0,
        scoring="softmax",
        has_expert_bias=False,
        renormalize=config.boolean("norm_topk_prob", False),
        renormalize_epsilon=0.0,
        scaling=1.0,
        fp32_combine=False,
    )


def _read_moe_layers(config: ConfigReader, num_layers: int, num_experts: int) -> tuple[bool, ...]:
    step = config.integer("decoder_sparse_step", 1)
    dense = config.value("mlp_only_layers") or []
    if not isinstance(dense, list) or any(
        isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < num_layers for i in dense
    ):
        raise config.wrong(
            "mlp_only_layers", f"must be a list of layers below num_hidden_layers={num_layers}"
        )
    named = frozenset(dense)
    return tuple(
        num_experts > 0 and i not in named and (i + 1) % step == 0 for i in range(num_layers)
    )
