"""Every op the models need. `ops.rms_norm(x, w, eps)` runs the body of x's device."""

from moestro.ops.activation import silu_and_mul
from moestro.ops.attention import AttentionMetadata, attention_plan, paged_attention
from moestro.ops.kv_pages import NO_SLOT, KVPages, store_kv
from moestro.ops.linear import embedding, linear
from moestro.ops.logit_edits import (
    TokenBias,
    TokenCounts,
    TokenMask,
    apply_penalties,
    apply_token_bias,
    apply_token_mask,
)
from moestro.ops.moe import ExpertWeights, moe_experts
from moestro.ops.norm import add_rms_norm, mtp_input, rms_norm
from moestro.ops.registry import Body, Op, all_ops, implements
from moestro.ops.rope import Rotary, qk_norm_rope, qk_norm_rope_store
from moestro.ops.routing import (
    GatingRule,
    RouterWeights,
    Routing,
    moe_gating_top_k,
    moe_router,
    router_logits,
)
from moestro.ops.sampling import (
    RankedLogprobs,
    SampledRows,
    SamplingBatch,
    SamplingMetadata,
    sample,
    sample_tokens,
    token_logprobs,
)

__all__ = [
    "NO_SLOT",
    "AttentionMetadata",
    "Body",
    "ExpertWeights",
    "GatingRule",
    "KVPages",
    "Op",
    "RankedLogprobs",
    "Rotary",
    "RouterWeights",
    "Routing",
    "SampledRows",
    "SamplingBatch",
    "SamplingMetadata",
    "TokenBias",
    "TokenCounts",
    "TokenMask",
    "add_rms_norm",
    "all_ops",
    "apply_penalties",
    "apply_token_bias",
    "apply_token_mask",
    "attention_plan",
    "embedding",
    "implements",
    "linear",
    "moe_experts",
    "moe_gating_top_k",
    "moe_router",
    "mtp_input",
    "paged_attention",
    "qk_norm_rope",
    "qk_norm_rope_store",
    "rms_norm",
    "router_logits",
    "sample",
    "sample_tokens",
    "silu_and_mul",
    "store_kv",
    "token_logprobs",
]
