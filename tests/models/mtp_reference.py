"""One multi-token-prediction step of Hy3 in float64, written from its definition.

    e = E[t_{i+1}], 0 at position 0
    u = eh_proj [RMS(e; enorm), RMS(h_i; hnorm)]
    y = decoder layer with experts (u), rotation at position i, causal over the steps before
    m = RMS(y; final_layernorm)

Whole sequence at once, no pages, no ops of the package.
"""

import math

import torch

from moestro.core.model_spec import ModelSpec

Tensor = torch.Tensor
Weights = dict[str, Tensor]


def mtp_step(
    weights: Weights, spec: ModelSpec, layer: int, hidden: Tensor, next_ids: Tensor
) -> Tensor:
    """hidden: [L, N] at positions 0..L-1; next_ids: [L]. Returns m [L, N]."""
    prefix = f"model.layers.{layer}."
    w = {k.removeprefix(prefix): v.double() for k, v in weights.items() if k.startswith(prefix)}
    eps = spec.rms_norm_eps
    embeddings = weights["model.embed_tokens.weight"].double()[next_ids].clone()
    embeddings[0] = 0
    both = [_rms(embeddings, w["enorm.weight"], eps), _rms(hidden, w["hnorm.weight"], eps)]
    x = torch.cat(both, dim=1) @ w["eh_proj.weight"].T
    x = x + _attention(_rms(x, w["input_layernorm.weight"], eps), w, spec)
    x = x + _experts(_rms(x, w["post_attention_layernorm.weight"], eps), w, spec)
    return _rms(x, w["final_layernorm.weight"], eps)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _attention(x: Tensor, w: Weights, spec: ModelSpec) -> Tensor:
    length, dim, heads = len(x), spec.head_dim, spec.num_attention_heads
    kv_heads = spec.num_key_value_heads
    qkv = (x @ w["self_attn.qkv_proj.weight"].T).view(length, -1, dim)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    q = _rotate(_rms(q, w["self_attn.q_norm.weight"], spec.rms_norm_eps), spec.rope.theta)
    k = _rotate(_rms(k, w["self_attn.k_norm.weight"], spec.rms_norm_eps), spec.rope.theta)
    future = torch.ones(length, length).triu(1).bool()
    out = []
    for head in range(heads):
        own = head // (heads // kv_heads)
        scores = q[:, head] @ k[:, own].T / math.sqrt(dim)
        out.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[:, own])
    return torch.cat(out, dim=1) @ w["self_attn.o_proj.weight"].T


def _rotate(x: Tensor, theta: float) -> Tensor:
    half = x.shape[2] // 2
    angle = torch.arange(len(x)).double()[:, None] * theta ** -(torch.arange(half).double() / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _experts(x: Tensor, w: Weights, spec: ModelSpec) -> Tensor:
    moe = spec.moe
    assert moe is not None
    out = []
    for row in x:
        scores = 1 / (1 + torch.exp(-(w["mlp.gate.weight"] @ row)))
        chosen = (scores + w["mlp.expert_bias"]).argsort(descending=True)[: moe.num_experts_per_tok]
        share = scores[chosen] / (scores[chosen].sum() + 1e-20) * moe.scaling
        gate_up, down = w["mlp.experts.gate_up_proj"][chosen], w["mlp.experts.down_proj"][chosen]
        routed = sum(s * _swiglu(row, g, d) for s, g, d in zip(share, gate_up, down, strict=True))
        shared = _swiglu(
            row,
            w["mlp.shared_experts.gate_up_proj.weight"],
            w["mlp.shared_experts.down_proj.weight"],
        )
        out.append(routed + shared)
    return torch.stack(out)


def _swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (gate_up @ x).chunk(2)
    return down @ (gate / (1 + torch.exp(-gate)) * up)
