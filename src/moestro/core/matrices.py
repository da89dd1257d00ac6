"""The weight matrices of a model: names, shapes, and the checkpoint modules they come from."""

from collections.abc import Iterator
from dataclasses import dataclass

from moestro.core.model_spec import ModelSpec
from moestro.core.weight_format import HEAD


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter [M, K], or stacked [E, M, K], that is multiplied with activations.

    module: the checkpoint's (first) module of it, as the Hub's checkpoints name it; a quantised
    checkpoint speaks of those.
    """

    name: str
    shape: tuple[int, ...]
    module: str

    @property
    def num_rows(self) -> int:
        """Rows of all its matrices together."""
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows


def matrices(spec: ModelSpec, num_mtp_layers: int) -> Iterator[Matrix]:
    """Every matrix that may be quantised. Not: embedding table, router, norms."""
    if not spec.tie_word_embeddings:
        yield Matrix(HEAD, (spec.vocab_size, spec.hidden_size), "lm_head")
    for i, is_moe in enumerate(spec.moe_layers):
        yield from _layer(spec, f"model.layers.{i}.", is_moe)
    for i in range(spec.num_hidden_layers, spec.num_hidden_layers + num_mtp_layers):
        layer = f"model.layers.{i}."
        yield from _layer(spec, layer, spec.moe is not None)
        shape = (spec.hidden_size, 2 * spec.hidden_size)
        yield Matrix(f"{layer}eh_proj.weight", shape, f"{layer}eh_proj")


def _layer(spec: ModelSpec, layer: str, is_moe: bool) -> Iterator[Matrix]:
    attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
    heads, hidden = spec.num_attention_heads, spec.hidden_size
    qkv_rows = (heads + 2 * spec.num_key_value_heads) * spec.head_dim
    yield Matrix(f"{attention}qkv_proj.weight", (qkv_rows, hidden), f"{attention}q_proj")
    o_shape = (hidden, heads * spec.head_dim)
    yield Matrix(f"{attention}o_proj.weight", o_shape, f"{attention}o_proj")
    if not is_moe or spec.moe is None:
        yield from _swiglu(mlp, mlp, spec.intermediate_size, hidden)
        return
    moe = spec.moe
    experts = f"{mlp}experts."
    for matrix in _swiglu(experts, f"{experts}0.", moe.intermediate_size, hidden):
        shape = (moe.num_experts, *matrix.shape)
        yield Matrix(matrix.name.removesuffix(".weight"), shape, matrix.module)
    if moe.num_shared_experts:
        shared = moe.shared_intermediate_size
        yield from _swiglu(f"{mlp}shared_experts.", f"{mlp}shared_mlp.", shared, hidden)


def _swiglu(names: str, modules: str, intermediate: int, hidden: int) -> Iterator[Matrix]:
    shape = (2 * intermediate, hidden)
    yield Matrix(f"{names}gate_up_proj.weight", shape, f"{modules}gate_proj")
    yield Matrix(f"{names}down_proj.weight", (hidden, intermediate), f"{modules}down_proj")
