"""The argument structs of the C ABI (csrc/types.h), field for field, and dtype codes."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch

DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _fields(text: str, kind: type) -> list[tuple[str, type]]:
    return [(name, kind) for name in text.split()]


class NormArgs(ctypes.Structure):
    """Arguments of rms_norm; residual and summed are null without a residual."""

    _fields_ = [
        *_fields("x residual weight out summed", c_void_p),
        *_fields("rows size", c_int64),
        ("eps", c_float),
        *_fields("dtype weight_dtype reserved", c_int32),
    ]


class MtpInputArgs(ctypes.Structure):
    """Arguments of mtp_input."""

    _fields_ = [
        *_fields("embeddings hidden_states positions", c_void_p),
        *_fields("embedding_weight hidden_weight out", c_void_p),
        *_fields("rows size", c_int64),
        ("eps", c_float),
        *_fields("dtype weight_dtype reserved", c_int32),
    ]


class ActivationArgs(ctypes.Structure):
    """Arguments of silu_and_mul."""

    _fields_ = [
        *_fields("x out", c_void_p),
        *_fields("rows size", c_int64),
        *_fields("dtype reserved", c_int32),
    ]


class RopeArgs(ctypes.Structure):
    """Arguments of qk_norm_rope."""

    _fields_ = [
        *_fields("qkv q_weight k_weight cos_sin q k v", c_void_p),
        *_fields("num_tokens num_heads num_kv_heads head_dim rotary_dim", c_int64),
        ("eps", c_float),
        *_fields("dtype weight_dtype reserved", c_int32),
    ]


class EmbeddingArgs(ctypes.Structure):
    """Arguments of embedding."""

    _fields_ = [
        *_fields("ids weight out", c_void_p),
        *_fields("num_tokens vocab_size row_bytes", c_int64),
    ]


class PackedWeight(ctypes.Structure):
    """A weight in the packed layout."""

    _fields_ = [
        ("data", c_void_p),
        *_fields("num_experts num_rows in_features", c_int64),
        *_fields("format group_size flags reserved", c_int32),
    ]


class PackArgs(ctypes.Structure):
    """Arguments of pack and unpack."""

    _fields_ = [
        ("weight", PackedWeight),
        *_fields("codes scales zeros ids", c_void_p),
        *_fields("expert start count", c_int64),
    ]


class LinearArgs(ctypes.Structure):
    """Arguments of linear."""

    _fields_ = [
        *_fields("x out", c_void_p),
        ("weight", PackedWeight),
        ("num_tokens", c_int64),
        *_fields("x_dtype out_dtype", c_int32),
    ]


class GatingArgs(ctypes.Structure):
    """Arguments of moe_gating_top_k; bias may be null."""

    _fields_ = [
        *_fields("logits bias topk_ids topk_weights", c_void_p),
        *_fields("num_tokens num_experts top_k", c_int64),
        *_fields("epsilon scaling", c_float),
        *_fields("softmax renormalize", c_int32),
    ]


class RouterArgs(ctypes.Structure):
    """Arguments of moe_router; bias, counts and logits may be null, topk_ids for logits only."""

    _fields_ = [
        *_fields("x weight bias counts logits topk_ids topk_weights", c_void_p),
        *_fields("num_tokens hidden num_experts top_k", c_int64),
        *_fields("epsilon scaling", c_float),
        *_fields("softmax renormalize x_dtype terms", c_int32),
    ]


class KvPagesArgs(ctypes.Structure):
    """One layer's pages; strides in elements, scales null unless the elements are codes."""

    _fields_ = [
        *_fields("k v k_scales v_scales", c_void_p),
        *_fields("k_page_stride k_head_stride k_slot_stride", c_int64),
        *_fields("v_page_stride v_head_stride v_slot_stride", c_int64),
        *_fields("k_scale_page_stride k_scale_head_stride", c_int64),
        *_fields("v_scale_page_stride v_scale_head_stride", c_int64),
        *_fields("num_pages page_size", c_int64),
        *_fields("dtype reserved", c_int32),
    ]


class PlanArgs(ctypes.Structure):
    """Arguments of attention_plan."""

    _fields_ = [
        *_fields("query_start_loc seq_lens page_table plan", c_void_p),
        *_fields("capacity page_table_stride page_table_width", c_int64),
        *_fields("num_tokens num_seqs num_heads num_kv_heads head_dim", c_int64),
        *_fields("kv_row_bytes num_pages page_size num_parts", c_int64),
    ]


class AttentionArgs(ctypes.Structure):
    """Arguments of paged_attention; strides in elements."""

    _fields_ = [
        *_fields("q out query_start_loc seq_lens page_table plan", c_void_p),
        ("pages", KvPagesArgs),
        *_fields("page_table_stride page_table_width", c_int64),
        *_fields("num_tokens num_seqs num_heads num_kv_heads head_dim plan_size", c_int64),
        ("q_dtype", c_int32),
        ("scale", c_float),
    ]


class MoeArgs(ctypes.Structure):
    """Arguments of moe_experts; the shared weights' data is null without them."""

    _fields_ = [
        *_fields("x out topk_ids topk_weights", c_void_p),
        *[(name, PackedWeight) for name in ["gate_up", "down", "shared_gate_up", "shared_down"]],
        *_fields("num_tokens top_k", c_int64),
        *_fields("x_dtype fp32_combine", c_int32),
    ]


class StoreKvArgs(ctypes.Structure):
    """Arguments of store_kv; strides in elements."""

    _fields_ = [
        *_fields("k v slots", c_void_p),
        ("pages", KvPagesArgs),
        *_fields("k_token_stride k_head_stride v_token_stride v_head_stride", c_int64),
        *_fields("num_tokens num_kv_heads head_dim", c_int64),
        *_fields("dtype reserved", c_int32),
    ]


class RopeStoreArgs(ctypes.Structure):
    """Arguments of qk_norm_rope_store."""

    _fields_ = [
        *_fields("qkv q_weight k_weight table positions slots q", c_void_p),
        ("pages", KvPagesArgs),
        *_fields("num_tokens num_heads num_kv_heads head_dim rotary_dim num_positions", c_int64),
        ("eps", c_float),
        *_fields("dtype weight_dtype hadamard", c_int32),
    ]


class SampleArgs(ctypes.Structure):
    """Arguments of sample; a null pointer: no row has that option."""

    _fields_ = [
        *_fields("logits temperature top_k top_p min_p seed sample_index position", c_void_p),
        *_fields("bias_starts bias_sizes bias_ids bias_values mask_rows mask_bits", c_void_p),
        *_fields("count_starts count_sizes count_ids counts", c_void_p),
        *_fields("repetition frequency presence num_top", c_void_p),
        *_fields("token_ids finite logprob_ids logprobs ranks", c_void_p),
        *_fields("num_rows vocab row_stride mask_stride logprob_stride", c_int64),
        *_fields("num_bias num_counts num_masks", c_int64),
    ]


class LogprobArgs(ctypes.Structure):
    """Arguments of token_logprobs."""

    _fields_ = [
        *_fields("logits token_ids ids logprobs ranks", c_void_p),
        *_fields("num_rows vocab row_stride num_top", c_int64),
    ]


ARGUMENTS: dict[str, type[ctypes.Structure]] = {
    "rms_norm": NormArgs,
    "mtp_input": MtpInputArgs,
    "silu_and_mul": ActivationArgs,
    "qk_norm_rope": RopeArgs,
    "store_kv": StoreKvArgs,
    "qk_norm_rope_store": RopeStoreArgs,
    "embedding": EmbeddingArgs,
    "linear": LinearArgs,
    "pack": PackArgs,
    "unpack": PackArgs,
    "moe_gating_top_k": GatingArgs,
    "moe_router": RouterArgs,
    "moe_experts": MoeArgs,
    "attention_plan": PlanArgs,
    "paged_attention": AttentionArgs,
    "sample": SampleArgs,
    "token_logprobs": LogprobArgs,
}
"""Every op of the library and its struct."""
