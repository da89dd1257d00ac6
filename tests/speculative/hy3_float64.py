"""Hy3 with its MTP layers in float64, from a checkpoint's own names: no ops, no pages, no torch.

Written from the published description of the model, apart from tests.models.mtp_reference and from
the package, so that a misreading has to be made three times to go unseen. One sequence at a time;
every position attends by a plain matrix product.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from moestro.core.model_spec import ModelSpec

Array = npt.NDArray[np.float64]
Tensors = Callable[[str], Array]
"""A tensor by the name it has on the Hub."""


class Hy3Float64:
    """tensors: the weights; spec: sizes and constants of config.json."""

    def __init__(self, tensors: Tensors, spec: ModelSpec) -> None:
        self._tensors = tensors
        self._spec = spec
        self._table = tensors("model.embed_tokens.weight")
        self._head = self._table if spec.tie_word_embeddings else tensors("lm_head.weight")

    def hidden_states(self, token_ids: Sequence[int]) -> Array:
        """[L, N] after the final norm."""
        x = self._table[np.asarray(token_ids)]
        for layer, is_moe in enumerate(self._spec.moe_layers):
            x = self._decoder(f"model.layers.{layer}.", x, is_moe)
        return self._norm(x, "model.norm.weight")

    def logits(self, hidden: Array) -> Array:
        return hidden @ self._head.T

    def mtp(self, index: int, hidden: Array, next_ids: Sequence[int]) -> Array:
        """MTP layer `index` over slots 0 .. L - 1: slot i from hidden[i] and next_ids[i]."""
        prefix = f"model.layers.{self._spec.num_hidden_layers + index}."
        embedded = self._table[np.asarray(next_ids)] * (np.arange(len(next_ids)) > 0)[:, None]
        both = (
            self._norm(embedded, prefix + "enorm.weight"),
            self._norm(hidden, prefix + "hnorm.weight"),
        )
        u = np.concatenate(both, axis=1) @ self._tensors(prefix + "eh_proj.weight").T
        y = self._decoder(prefix, u, True)
        return self._norm(y, prefix + "final_layernorm.weight")

    def draft_logits(self, token_ids: Sequence[int], drafts: Sequence[int]) -> Array:
        """[len(drafts) + 1, V]: of a chain that goes on from token_ids by these drafts.

        Row s is what step s drafts from, given drafts[:s]. Step s uses layer s modulo their number,
        which has seen every slot before with the same hidden states and tokens.
        """
        known = [int(t) for t in token_ids]
        hidden = self.hidden_states(known[:-1])
        rows = []
        for step in range(len(drafts) + 1):
            behind = [*known[1:], *(int(d) for d in drafts[:step])]
            m = self.mtp(step % self._spec.num_mtp_layers, hidden, behind)[-1:]
            rows.append(self.logits(m)[0])
            hidden = np.concatenate([hidden, m])
        return np.stack(rows)

    def _norm(self, x: Array, name: str) -> Array:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean + self._spec.rms_norm_eps) * self._tensors(name)

    def _decoder(self, prefix: str, x: Array, is_moe: bool) -> Array:
        x = x + self._attention(prefix, self._norm(x, prefix + "input_layernorm.weight"))
        normed = self._norm(x, prefix + "post_attention_layernorm.weight")
        if is_moe:
            return x + np.stack([self._moe(prefix + "mlp.", row) for row in normed])
        return x + self._swiglu(prefix + "mlp.", normed)

    def _attention(self, prefix: str, x: Array) -> Array:
        spec, length = self._spec, len(x)
        heads, groups, dim = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim

        def projected(name: str, count: int) -> Array:
            weight = self._tensors(f"{prefix}self_attn.{name}_proj.weight")
            return (x @ weight.T).reshape(length, count, dim)

        q = self._turned(self._norm(projected("q", heads), prefix + "self_attn.q_norm.weight"))
        k = self._turned(self._norm(projected("k", groups), prefix + "self_attn.k_norm.weight"))
        v = projected("v", groups)
        out = np.empty((length, heads, dim))
        for head in range(heads):
            group = head * groups // heads
            for i in range(length):
                scores = k[: i + 1, group] @ q[i, head] / dim**0.5
                weights = np.exp(scores - scores.max())
                out[i, head] = weights @ v[: i + 1, group] / weights.sum()
        return out.reshape(length, -1) @ self._tensors(prefix + "self_attn.o_proj.weight").T

    def _turned(self, x: Array) -> Array:
        """Pair (i, i + D / 2) of position p turned by p theta^(-2 i / D)."""
        half = x.shape[2] // 2
        rates = self._spec.rope.theta ** (-2.0 * np.arange(half) / (2 * half))
        turn = np.exp(1j * np.arange(len(x))[:, None] * rates)[:, None]
        pairs = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    def _moe(self, prefix: str, x: Array) -> Array:
        moe = self._spec.moe
        assert moe is not None
        scores = 1 / (1 + np.exp(-(self._tensors(prefix + "router.gate.weight") @ x)))
        biased = scores + self._tensors(prefix + "expert_bias")
        chosen = np.argsort(-biased, kind="stable")[: moe.num_experts_per_tok]
        weights = scores[chosen] / (scores[chosen].sum() + 1e-20) * moe.scaling
        routed = sum(
            w * self._swiglu(f"{prefix}experts.{e}.", x)
            for w, e in zip(weights, chosen.tolist(), strict=True)
        )
        total: Array = routed + self._swiglu(prefix + "shared_mlp.", x)
        return total

    def _swiglu(self, prefix: str, x: Array) -> Array:
        gate, up, down = (
            self._tensors(f"{prefix}{name}_proj.weight") for name in ("gate", "up", "down")
        )
        g = x @ gate.T
        out: Array = (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T
        return out
