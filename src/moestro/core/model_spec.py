"""ModelSpec: what a checkpoint is, as read from its config.json by core.model_config."""

from dataclasses import dataclass

from moestro.core.quantization_config import StoredQuantization


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding over the whole head, NeoX pairs (i, i + head_dim / 2).

    rope_type: default or yarn. The yarn fields are meaningful for yarn only; attention_factor
    multiplies cos and sin.
    """

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """The routed part of an MoE layer.

    scoring: sigmoid or softmax. has_expert_bias: a fp32 bias takes part in selection only.
    renormalize divides the chosen weights by their sum (+ renormalize_epsilon); scaling then
    multiplies them. fp32_combine: routed + shared are added in fp32 and cast once.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    num_shared_experts: int
    scoring: str
    has_expert_bias: bool
    renormalize: bool
    renormalize_epsilon: float
    scaling: float
    fp32_combine: bool

    @property
    def shared_intermediate_size(self) -> int:
        return self.intermediate_size * self.num_shared_experts


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes, flags and token ids of one model. moe_layers[i]: whether layer i is MoE.

    num_mtp_layers: multi-token-prediction layers the config promises (names
    model.layers.<num_hidden_layers + i>), never counted in num_hidden_layers. quantization: how the
    checkpoint's weights are quantised, if they are; dtype is that of the others.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    moe: MoeSpec | None
    moe_layers: tuple[bool, ...]
    num_mtp_layers: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    quantization: StoredQuantization | None = None

    @property
    def num_attention_parameters(self) -> int:
        """q, k, v, o projections and the two head norms of one layer."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        return heads * self.head_dim * self.hidden_size + 2 * self.head_dim

    def num_layer_parameters(self, is_moe: bool, *, active: bool = False) -> int:
        """All parameters of one decoder layer, or those one token uses.

        The expert bias counts as one parameter an expert, as in the published totals.
        """
        h = self.hidden_size
        common = self.num_attention_parameters + 2 * h
        if not is_moe:
            return common + 3 * h * self.intermediate_size
        assert self.moe is not None
        moe = self.moe
        experts = moe.num_experts_per_tok if active else moe.num_experts
        ffn = 3 * h * (moe.intermediate_size * experts + moe.shared_intermediate_size)
        bias = moe.num_experts if moe.has_expert_bias else 0
        return common + ffn + moe.num_experts * h + bias

    @property
    def num_parameters(self) -> int:
        """Trunk total, without the MTP layers."""
        return self._count(active=False)

    @property
    def num_active_parameters(self) -> int:
        """Trunk parameters that one token uses, the whole embedding table counted."""
        return self._count(active=True)

    @property
    def num_mtp_parameters(self) -> int:
        """All MTP layers: a decoder layer, eh_proj and three norms each."""
        if not self.num_mtp_layers:
            return 0
        h = self.hidden_size
        one = self.num_layer_parameters(self.moe is not None) + 2 * h * h + 3 * h
        return self.num_mtp_layers * one

    def kv_bytes_per_token(
        self, element_bytes: int, scale_bytes: int = 0, num_mtp_layers: int = 0
    ) -> int:
        """KV bytes one token takes over the trunk's layers and num_mtp_layers more.

        scale_bytes: beside each row of D.
        """
        row_bytes = self.head_dim * element_bytes + scale_bytes
        layers = self.num_hidden_layers + num_mtp_layers
        return 2 * layers * self.num_key_value_heads * row_bytes

    def _count(self, *, active: bool) -> int:
        table = self.vocab_size * self.hidden_size
        layers = sum(self.num_layer_parameters(m, active=active) for m in self.moe_layers)
        return table * (1 if self.tie_word_embeddings else 2) + layers + self.hidden_size
