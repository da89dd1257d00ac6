"""What a step has to do at least: bytes it reads and operations it computes. Pure functions.

A rate as a fraction of the bound is the time of that work at the machine's measured limits, over
the time that was measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from moestro.core.model_spec import ModelSpec

GROUP = 32
"""Weights that share a scale in w4a8 (as benchmarked), Q8_0 and Q4_0."""
ROUTER = "float32"
"""Router weights: ours are two bf16 numbers each, peers' are fp32 or their dtype."""


def row_bytes(storage: str, width: int) -> float:
    """Bytes of one weight row of `width` elements, scales included.

    storage: float32, bfloat16, w8a8 (one fp32 scale a row), w4a8 (one bf16 scale a group of 32),
    q8_0 and q4_0 (one fp16 scale a group of 32). Raises KeyError for another.
    """
    return {
        "float32": 4.0 * width,
        "bfloat16": 2.0 * width,
        "w8a8": width + 4.0,
        "w4a8": width / 2 + 2.0 * width / GROUP,
        "q8_0": width * 34 / GROUP,
        "q4_0": width * 18 / GROUP,
    }[storage]


@dataclass(frozen=True, slots=True)
class Storage:
    """How the weights lie in memory: of layers, and of the output layer."""

    layers: str
    lm_head: str


OURS = {
    "bf16": Storage("bfloat16", "bfloat16"),
    "w8a8": Storage("w8a8", "w8a8"),
    "w4a8": Storage("w4a8", "w8a8"),
}
GGUF = {
    "bf16": Storage("bfloat16", "bfloat16"),
    "w8a8": Storage("q8_0", "q8_0"),
    "w4a8": Storage("q4_0", "q4_0"),
}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [rows, width]; `count` of them; whether only chosen experts of them are used."""

    rows: int
    width: int
    count: int = 1
    routed: bool = False
    router: bool = False


def matrices(spec: ModelSpec) -> Iterator[Matrix]:
    """Every weight matrix of the layers, in order; no embedding, no output layer."""
    hidden, dim = spec.hidden_size, spec.head_dim
    heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
    for is_moe in spec.moe_layers:
        yield Matrix((heads + 2 * kv_heads) * dim, hidden)
        yield Matrix(hidden, heads * dim)
        if not is_moe or spec.moe is None:
            yield from _swiglu(hidden, spec.intermediate_size)
            continue
        moe = spec.moe
        yield Matrix(moe.num_experts, hidden, router=True)
        yield Matrix(2 * moe.intermediate_size, hidden, moe.num_experts, routed=True)
        yield Matrix(hidden, moe.intermediate_size, moe.num_experts, routed=True)
        if moe.num_shared_experts:
            yield from _swiglu(hidden, moe.shared_intermediate_size)


def _swiglu(hidden: int, inner: int) -> Iterator[Matrix]:
    yield Matrix(2 * inner, hidden)
    yield Matrix(hidden, inner)


def experts_used(num_experts: int, top_k: int, tokens: int) -> float:
    """Expected distinct experts of `tokens` tokens whose choices are uniform and independent.

    A random model routes nearly so. Skewed routing reads fewer.
    """
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)


def step_bytes(spec: ModelSpec, storage: Storage, batch: int, context: int) -> float:
    """Bytes that one decode step of `batch` sequences reads, each with `context` tokens of KV.

    Every weight once, scales included; of the experts those that the batch is expected to
    choose; KV in two bytes an element.
    """
    total = spec.vocab_size * row_bytes(storage.lm_head, spec.hidden_size)
    for m in matrices(spec):
        used = float(m.count)
        if m.routed and spec.moe is not None:
            used = experts_used(spec.moe.num_experts, spec.moe.num_experts_per_tok, batch)
        total += used * m.rows * row_bytes(ROUTER if m.router else storage.layers, m.width)
    return total + batch * context * spec.kv_bytes_per_token(2)


def flops(spec: ModelSpec, tokens: int, *, pairs: int, outputs: int) -> float:
    """Multiplications and additions, one each, of `tokens` tokens.

    pairs: (query, key) pairs that attention looks at in one layer; outputs: rows of logits.
    """
    total = 0.0
    for m in matrices(spec):
        used = spec.moe.num_experts_per_tok if m.routed and spec.moe is not None else m.count
        total += 2.0 * tokens * used * m.rows * m.width
    attention = 4.0 * pairs * spec.num_attention_heads * spec.head_dim * spec.num_hidden_layers
    return total + attention + 2.0 * outputs * spec.vocab_size * spec.hidden_size
