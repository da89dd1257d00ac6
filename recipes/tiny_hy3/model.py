"""The Hy3 architecture for training: whole sequences, autograd, no KV pages.

Parameters carry the names and shapes of the serving model (qkv_proj, gate_up_proj, stacked
experts), so the package's own loader fills it and its name map exports it. Shapes: B sequences,
T tokens, N hidden, V vocab, E experts, K top-k, I intermediate, H heads, G kv heads, D head dim.
"""

import math

import torch
from torch import nn
from torch.nn import functional

from moestro.core.model_spec import ModelSpec, MoeSpec

_STD = 0.02


class Linear(nn.Module):
    """weight [out, in], no bias."""

    def __init__(self, in_features: int, out_features: int, std: float = _STD) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) * std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight)


class RMSNorm(nn.Module):
    """Computed in fp32, returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Causal GQA with head norms before RoPE."""

    def __init__(self, spec: ModelSpec, out_std: float) -> None:
        super().__init__()
        self.heads, self.kv_heads = spec.num_attention_heads, spec.num_key_value_heads
        self.dim = spec.head_dim
        rows = (self.heads + 2 * self.kv_heads) * self.dim
        self.qkv_proj = Linear(spec.hidden_size, rows)
        self.o_proj = Linear(self.heads * self.dim, spec.hidden_size, out_std)
        self.q_norm = RMSNorm(self.dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(self.dim, spec.rms_norm_eps)

    def forward(self, x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv_proj(x).view(batch, length, -1, self.dim).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotate(self.q_norm(q), *cos_sin), rotate(self.k_norm(k), *cos_sin)
        out = functional.scaled_dot_product_attention(
            q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """SwiGLU; gate rows first."""

    def __init__(self, hidden: int, intermediate: int, out_std: float) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden, 2 * intermediate)
        self.down_proj = Linear(intermediate, hidden, out_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)


class Experts(nn.Module):
    """gate_up_proj [E, 2I, N], down_proj [E, N, I]."""

    def __init__(self, moe: MoeSpec, hidden: int, out_std: float) -> None:
        super().__init__()
        e, i = moe.num_experts, moe.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.randn(e, 2 * i, hidden) * _STD)
        self.down_proj = nn.Parameter(torch.randn(e, hidden, i) * out_std)

    def forward(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """x: rows sorted by expert, counts[e] of them for expert e."""
        # unbind, not indexing: its gradient is one stack, not a padded tensor for every expert.
        weights = zip(self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True)
        outputs = []
        for rows, (gate_up_proj, down_proj) in zip(x.split(counts), weights, strict=True):
            gate, up = functional.linear(rows, gate_up_proj).chunk(2, dim=-1)
            outputs.append(functional.linear(functional.silu(gate) * up, down_proj))
        return torch.cat(outputs)


class MoE(nn.Module):
    """Sigmoid router in fp32; expert_bias takes part in the choice only, and learns by balance.

    last_load [E]: share of the last forward's choices each expert got.
    """

    expert_bias: torch.Tensor

    def __init__(self, spec: ModelSpec, out_std: float) -> None:
        super().__init__()
        assert spec.moe is not None
        self.moe = spec.moe
        self.gate = Linear(spec.hidden_size, self.moe.num_experts)
        self.register_buffer("expert_bias", torch.zeros(self.moe.num_experts))
        self.experts = Experts(self.moe, spec.hidden_size, out_std)
        width = self.moe.shared_intermediate_size
        self.shared_experts = MLP(spec.hidden_size, width, out_std)
        self.last_load = torch.zeros(self.moe.num_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        top_k = self.moe.num_experts_per_tok
        with torch.autocast("cpu", enabled=False):
            scores = torch.sigmoid(self.gate(flat.float()))
        chosen = (scores.detach() + self.expert_bias).topk(top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + self.moe.renormalize_epsilon)
        weights = weights * self.moe.scaling
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.moe.num_experts)
        self.last_load = counts / counts.sum()
        token = order // top_k
        parts = self.experts(flat[token], counts.tolist())
        parts = parts * weights.flatten()[order, None].to(parts.dtype)
        routed = torch.zeros_like(flat, dtype=parts.dtype).index_add(0, token, parts)
        return (routed + self.shared_experts(flat)).view(x.shape)


class DecoderLayer(nn.Module):
    def __init__(self, spec: ModelSpec, is_moe: bool) -> None:
        super().__init__()
        hidden, eps = spec.hidden_size, spec.rms_norm_eps
        # Outputs added to the residual start smaller, the more layers add to it.
        out_std = _STD / math.sqrt(2 * spec.num_hidden_layers)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(spec, out_std)
        self.mlp = MoE(spec, out_std) if is_moe else MLP(hidden, spec.intermediate_size, out_std)

    def forward(self, x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class MTPLayer(DecoderLayer):
    """From the trunk's normed hidden state at i and the embedding of token i + 1."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, True)
        hidden, eps = spec.hidden_size, spec.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.final_layernorm = RMSNorm(hidden, eps)
        self.eh_proj = Linear(2 * hidden, hidden)

    def predict(
        self,
        hidden: torch.Tensor,
        next_embedding: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Both [B, T, N]; returns [B, T, N] for the head. Position 0 sees no embedding."""
        seen = torch.cat((torch.zeros_like(next_embedding[:, :1]), next_embedding[:, 1:]), dim=1)
        x = self.eh_proj(torch.cat((self.enorm(seen), self.hnorm(hidden)), dim=-1))
        return self.final_layernorm(self(x, cos_sin))


class Trunk(nn.Module):
    """Layers 0 .. num_hidden_layers - 1, then the MTP layer."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=_STD)
        self.layers = nn.ModuleList(DecoderLayer(spec, is_moe) for is_moe in spec.moe_layers)
        self.layers.extend(MTPLayer(spec) for _ in range(spec.num_mtp_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)


class TrainingModel(nn.Module):
    """A hy_v3 model with one MTP layer, an untied head and plain RoPE."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        plain = spec.rope.rope_type == "default" and not spec.tie_word_embeddings
        if spec.model_type != "hy_v3" or spec.num_mtp_layers != 1 or not plain:
            raise SystemExit("the recipe trains hy_v3 with one MTP layer, untied, without YaRN")
        self.spec = spec
        self.model = Trunk(spec)
        self.lm_head = Linear(spec.hidden_size, spec.vocab_size)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [B, T]. Logits [B, T, V] for token i + 1, and [B, T - 1, V] of MTP for i + 2."""
        trunk, layers = self.model, self.model.layers
        cos, sin = rope_table(ids.shape[1], self.spec.head_dim, self.spec.rope.theta)
        embedding = trunk.embed_tokens(ids)
        x = embedding
        for layer in layers[: self.spec.num_hidden_layers]:
            x = layer(x, (cos, sin))
        hidden = trunk.norm(x)
        mtp = layers[self.spec.num_hidden_layers]
        assert isinstance(mtp, MTPLayer)
        ahead = mtp.predict(hidden[:, :-1], embedding[:, 1:], (cos[:-1], sin[:-1]))
        return self.lm_head(hidden), self.lm_head(ahead)

    def moe_layers(self) -> list[MoE]:
        return [m for m in self.modules() if isinstance(m, MoE)]


def losses(model: TrainingModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross entropy of the trunk and of MTP on ids [B, T + 1]."""
    logits, ahead = model(ids[:, :-1])
    trunk = functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    return trunk, functional.cross_entropy(ahead.float().flatten(0, 1), ids[:, 2:].flatten())


def rope_table(length: int, dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, both [T, D], the two halves alike."""
    inverse = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, H, T, D], pairs (i, i + D / 2)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
