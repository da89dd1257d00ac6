"""How many bytes things take: weights, KV, buffers. Arithmetic on a ModelSpec, nothing else."""

from dataclasses import dataclass

from moestro.core.matrices import matrices
from moestro.core.model_spec import ModelSpec
from moestro.core.plan import (
    LOGITS_BLOCK_BYTES,
    ROTARY_BLOCK_POSITIONS,
    logits_rows,
    page_table_width,
)
from moestro.core.weight_format import FLOAT_BYTES, WeightFormats

ELEMENT_BYTES = FLOAT_BYTES
KV_CODE_BYTES = {"int8": 1, "fp8": 1}
"""A number of a quantised KV cache; each row of head_dim of them has an fp32 scale."""
_FP32 = 4
_ROUTER_PANEL = 32
"""A packed router holds a multiple of this many experts."""
# Logits that are sampled, their processed copy, and sampling noise or sorted values.
_LOGIT_COPIES = 3


def weight_bytes(spec: ModelSpec, formats: WeightFormats, num_mtp_layers: int) -> int:
    """Bytes of all parameters; a device's layout may pad a little.

    Router weights and expert bias are fp32, matrices have their formats, the rest is plain. A head
    that is tied to the embedding is counted too: packed, it is a copy of its own.
    """
    element = FLOAT_BYTES[formats.plain.name]
    parameters = spec.num_parameters
    if spec.num_mtp_layers:
        parameters += spec.num_mtp_parameters // spec.num_mtp_layers * num_mtp_layers
    in_fp32 = 0
    if spec.moe is not None:
        one = spec.moe.num_experts * (spec.hidden_size + spec.moe.has_expert_bias)
        in_fp32 = one * (sum(spec.moe_layers) + num_mtp_layers)
    total = (parameters - in_fp32) * element + in_fp32 * _FP32
    for matrix in matrices(spec, num_mtp_layers):
        columns = matrix.shape[-1]
        one = formats.of(matrix.name).row_bytes(columns) - columns * element
        total += matrix.num_rows * one
    if spec.tie_word_embeddings:
        total += spec.vocab_size * formats.head.row_bytes(spec.hidden_size)
    return total


def kv_token_bytes(spec: ModelSpec, kv_cache_dtype: str, num_mtp_layers: int) -> int:
    """KV bytes of one token over the trunk's layers and num_mtp_layers, scales included."""
    if kv_cache_dtype in KV_CODE_BYTES:
        return spec.kv_bytes_per_token(KV_CODE_BYTES[kv_cache_dtype], _FP32, num_mtp_layers)
    return spec.kv_bytes_per_token(ELEMENT_BYTES[kv_cache_dtype], 0, num_mtp_layers)


def buffer_bytes(spec: ModelSpec, dtype: str, num_tokens: int, num_logits: int, length: int) -> int:
    """Estimate of what a step needs beside weights and KV.

    num_tokens computed in one step, num_logits rows that are sampled, length of the rotary table.
    Layers run one after another, so the widest part of one layer counts once; torch may keep
    freed blocks, which this does not see. The packed routers are counted here.
    """
    element = ELEMENT_BYTES[dtype]
    hidden = spec.hidden_size
    stream = 3 * hidden * element  # residual, layer input, layer output
    widest = max(_attention_elements(spec) * element, _dense_elements(spec) * element)
    if spec.moe is not None:
        widest = max(widest, _moe_bytes(spec, element))
    logits = num_logits * hidden * element + _logits_bytes(spec.vocab_size, num_tokens, num_logits)
    blocks = -(-length // ROTARY_BLOCK_POSITIONS)
    table = blocks * ROTARY_BLOCK_POSITIONS * spec.head_dim * _FP32
    packed = _packed_router_bytes(spec, sum(spec.moe_layers))
    return num_tokens * (stream + widest) + logits + table + packed


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """Of drafting: tokens of a step, sequences that draft, the longest one's length."""

    dtype: str
    num_tokens: int
    num_seqs: int
    length: int
    page_size: int
    num_mtp_layers: int


def graph_bytes(
    spec: ModelSpec, dtype: str, num_rows: int, num_seqs: int, length: int, page_size: int
) -> int:
    """What captured decode steps keep: intermediates and inputs.

    num_rows: tokens of one, drafts among them, of num_seqs sequences. length: of the longest
    sequence; every sequence has a row of page ids that long.
    """
    num_rows = min(num_rows, logits_rows(spec.vocab_size))
    packed = _packed_router_bytes(spec, sum(spec.moe_layers))
    step = buffer_bytes(spec, dtype, num_rows, 0, 0) - packed
    return step + num_rows * 3 * 8 + num_seqs * (8 + page_table_width(length, page_size) * 4)


def draft_bytes(spec: ModelSpec, plan: DraftSizes) -> int:
    """What drafting with MTP layers keeps beside a step's own: routers, and a step of its own."""
    element = ELEMENT_BYTES[plan.dtype]
    primed = plan.num_tokens * (3 * spec.hidden_size + _attention_elements(spec)) * element
    hidden = 4 * plan.num_seqs * spec.hidden_size * element  # in, joined (twice), out
    row = spec.vocab_size * _FP32
    logits = min(plan.num_seqs * row, max(row, LOGITS_BLOCK_BYTES))
    seqs = plan.num_seqs
    step = graph_bytes(spec, plan.dtype, seqs, seqs, plan.length, plan.page_size)
    routers = _packed_router_bytes(spec, plan.num_mtp_layers)
    return primed + hidden + logits + step + routers


def _packed_router_bytes(spec: ModelSpec, num_layers: int) -> int:
    """The routers' weights once more, as the kernels read them: 4 bytes each at most."""
    if spec.moe is None:
        return 0
    experts = -(-spec.moe.num_experts // _ROUTER_PANEL) * _ROUTER_PANEL
    return experts * spec.hidden_size * _FP32 * num_layers


def _logits_bytes(vocab_size: int, num_tokens: int, num_logits: int) -> int:
    """A block of logits that are sampled, or later one that scores a prompt, whichever is more.

    With prompt_logprobs every token of a step may be scored.
    """
    row = vocab_size * _FP32
    block = max(row, LOGITS_BLOCK_BYTES)
    return max(_LOGIT_COPIES * min(num_logits * row, block), min(num_tokens * row, block))


def _attention_elements(spec: ModelSpec) -> int:
    """One token's q, k, v before and after the rotation, and the heads' output."""
    qkv = (spec.num_attention_heads + 2 * spec.num_key_value_heads) * spec.head_dim
    return 2 * qkv + spec.num_attention_heads * spec.head_dim


def _dense_elements(spec: ModelSpec) -> int:
    """One token's gate and up, and their product, where some layer is dense."""
    return 0 if all(spec.moe_layers) else 3 * spec.intermediate_size


def _moe_bytes(spec: ModelSpec, element: int) -> int:
    """One token's router input and logits in fp32, and its experts' inputs, insides, outputs."""
    moe = spec.moe
    assert moe is not None
    router = (spec.hidden_size + 2 * moe.num_experts) * _FP32
    inside = 3 * moe.intermediate_size * element + spec.hidden_size * (element + _FP32)
    shared = 3 * moe.shared_intermediate_size * element
    return router + moe.num_experts_per_tok * inside + shared
