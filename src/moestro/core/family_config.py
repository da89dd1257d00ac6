"""Keys that both model families share."""

from dataclasses import dataclass, fields
from typing import Any

from moestro.core.config_reader import ConfigReader
from moestro.core.model_spec import RopeSpec
from moestro.core.rope_config import read_rope
from moestro.errors import UnsupportedError, shown

MAX_LAYERS = 10_000
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonKeys:
    """ModelSpec fields of the same name that are read alike for every family."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]

    def as_fields(self) -> dict[str, Any]:
        """Keyword arguments for ModelSpec."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def read_common(config: ConfigReader, head_dim: int) -> CommonKeys:
    """Read and cross-check the shared keys. Raises CheckpointError and UnsupportedError."""
    vocab_size = config.integer("vocab_size")
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads")
    if heads % kv_heads:
        raise config.wrong(
            "num_key_value_heads", f"must divide num_attention_heads={heads} without remainder"
        )
    if head_dim % 2:
        raise config.wrong("head_dim", f"must be even (rotary pairs); it is {head_dim}")
    config.require("hidden_act", "silu", "experts and MLPs are SwiGLU")
    for key in ("attention_bias", "qkv_bias", "mlp_bias"):
        config.require(key, False, "projections have no bias")
    _check_attention_is_full(config)
    trained_length = config.integer("max_position_embeddings")
    rope = read_rope(config, trained_length)
    _check_unused_tokens(config, vocab_size)
    return CommonKeys(
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size"),
        num_hidden_layers=config.integer("num_hidden_layers", high=MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", low=0.0),
        rope=rope,
        max_position_embeddings=_usable_length(trained_length, rope),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        dtype=_read_dtype(config),
        eos_token_ids=config.token_ids("eos_token_id", vocab_size),
    )


def _check_unused_tokens(config: ConfigReader, vocab_size: int) -> None:
    """The tokenizer says which tokens open and pad; ids beyond the table are wrong all the same."""
    config.token_id("bos_token_id", vocab_size)
    if config.value("pad_token_id") != -1:  # how some writers spell "none"
        config.token_id("pad_token_id", vocab_size)


def _check_attention_is_full(config: ConfigReader) -> None:
    config.require("use_sliding_window", False, "attention is over the whole context")
    sliding = config.value("sliding_window")
    if sliding is not None and not config.has("use_sliding_window"):
        raise UnsupportedError(
            f"{config.where}: sliding_window={shown(sliding)} without use_sliding_window=false is "
            "not supported (attention is over the whole context)."
        )
    layer_types = config.value("layer_types")
    if layer_types is None:
        return
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise UnsupportedError(
            f"{config.where}: layer_types={shown(layer_types)} is not supported; only "
            "full_attention layers are."
        )


def _usable_length(trained_length: int, rope: RopeSpec) -> int:
    """YaRN stretches what the model was trained on; the config may or may not say so already."""
    stretched = int(rope.original_max_position_embeddings * rope.factor)
    return max(trained_length, stretched) if rope.rope_type == "yarn" else trained_length


def _read_dtype(config: ConfigReader) -> str:
    """The checkpoint's type; absent it is float32, as transformers reads it."""
    key = config.alias("dtype", "torch_dtype")
    dtype = config.text(key, "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UnsupportedError(
            f"{config.where}: {key}={shown(dtype)} is not supported; {', '.join(_DTYPES)} are."
        )
    return dtype
