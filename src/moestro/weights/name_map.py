"""From checkpoint names to parameters: one table of needs, one table of spellings.

What a model needs is a list of parts, each named as the Hub's separate, per-expert checkpoints
name it, each a run of rows of one parameter. A checkpoint tensor in any spelling holds whole parts
one after another along its rows, so every layout reduces to copying rows.

Spellings accepted, for hy_v3 and qwen3_moe alike:
- Hub ("inner") and HF's in-memory ("outer") names: router.gate / gate, expert_bias /
  e_score_correction_bias, shared_mlp / shared_experts, experts one by one or stacked [E, 2I, N];
- fused qkv_proj (rows q, k, v) and gate_up_proj (gate first);
- old Hunyuan: mlp.gate.wg, gate_and_up_proj (up FIRST, as its model code splits it), and qkv_proj
  interleaved by KV head: for each, its query heads, then its k, then its v.

The two qkv_proj layouts have the same shape. A 4-dimensional tensor is interleaved; a
2-dimensional one is interleaved exactly when the checkpoint has an old Hunyuan spelling anywhere.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moestro.core.model_spec import ModelSpec

_Q, _K, _V = (f"self_attn.{n}_proj.weight" for n in "qkv")
_GATE, _UP, _DOWN = "gate_proj.weight", "up_proj.weight", "down_proj.weight"
_ROUTER = "mlp.router.gate.weight"
_BIAS = "mlp.expert_bias"

_MODULES = {
    # The same part under another name.
    "mlp.gate.weight": (_ROUTER,),
    "mlp.gate.wg.weight": (_ROUTER,),
    "mlp.e_score_correction_bias": (_BIAS,),
    "mlp.gate.e_score_correction_bias": (_BIAS,),
    # Several parts, one after another.
    "self_attn.qkv_proj.weight": (_Q, _K, _V),
}
_PAIRS = {
    "gate_up_proj.weight": (_GATE, _UP),
    "gate_and_up_proj.weight": (_UP, _GATE),
}
_FUSED_EXPERTS = {
    "mlp.experts.gate_up_proj": (_GATE, _UP),
    "mlp.experts.gate_up_proj.weight": (_GATE, _UP),
    "mlp.experts.down_proj": (_DOWN,),
    "mlp.experts.down_proj.weight": (_DOWN,),
}
_LAYER = re.compile(r"(model\.layers\.([0-9]+)\.)(.+)")
_FFN = re.compile(r"(mlp\.(?:shared_mlp\.|shared_experts\.|experts\.[0-9]+\.)?)([a-z_]+\.weight)")
_OLD_HUNYUAN = (".mlp.gate.wg.", ".gate_and_up_proj.")
_HARMLESS = re.compile(
    r"(model\.(layers\.[0-9]+\.self_attn\.)?)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"
)
_MTP_UNUSED = ("shared_head.", "embed_tokens.")


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor the model needs: rows [start, stop) of a parameter, or of one expert of it."""

    parameter: str
    start: int
    stop: int
    row_shape: tuple[int, ...] = ()
    expert: int | None = None

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.row_shape)


@dataclass(frozen=True, slots=True)
class RowCopy:
    """num_rows rows of a checkpoint tensor (leading dimensions flattened) into a parameter."""

    source: int
    parameter: str
    expert: int | None
    start: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one checkpoint tensor goes: the parts it holds, its allowed shapes, the copies."""

    parts: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    copies: tuple[RowCopy, ...]


class NameMap:
    """The map for one model. num_mtp_layers: how many MTP layers the model was built with."""

    def __init__(self, spec: ModelSpec, num_mtp_layers: int) -> None:
        self._spec = spec
        self._num_layers = spec.num_hidden_layers + num_mtp_layers
        self.parts: dict[str, Part] = dict(_needed_parts(spec, num_mtp_layers))

    def display_name(self, part: str) -> str:
        """The part under the name this model_type's Hub checkpoints use."""
        if self._spec.model_type == "qwen3_moe":
            return part.replace(_ROUTER, "mlp.gate.weight")
        return part

    def ignored(self, name: str) -> bool:
        """Known extras that carry nothing: RoPE buffers, and an MTP layer's copies of the shared
        tables, and (built without MTP) the MTP layers the config speaks of."""
        if _HARMLESS.fullmatch(name):
            return True
        match = _LAYER.fullmatch(name)
        if match is None:
            return False
        layer, first = int(match[2]), self._spec.num_hidden_layers
        if not first <= layer < first + self._spec.num_mtp_layers:
            return False
        return layer >= self._num_layers or match[3].startswith(_MTP_UNUSED)

    def place(self, name: str, shape: tuple[int, ...], old_hunyuan: bool) -> Placement | None:
        """Where the tensor goes; None: the model has no place for it.

        shape tells the 4-dimensional qkv_proj; old_hunyuan is uses_old_hunyuan_names of the whole
        checkpoint. A wrong shape is the caller's to report, against Placement.shapes.
        """
        match = _LAYER.fullmatch(name)
        prefix, suffix = (match[1], match[3]) if match else ("", name)
        if suffix in _FUSED_EXPERTS:
            return self._place_stacked(prefix, _FUSED_EXPERTS[suffix])
        names = tuple(prefix + part for part in _split(suffix))
        if any(part not in self.parts for part in names):
            return None
        if len(names) == 3:
            return self._place_qkv(names, interleaved=len(shape) == 4 or old_hunyuan)
        return self._place_rows(names)

    def _place_rows(self, names: tuple[str, ...]) -> Placement:
        parts = [self.parts[n] for n in names]
        rows = sum(p.num_rows for p in parts)
        return Placement(names, ((rows, *parts[0].row_shape),), tuple(_copies(parts)))

    def _place_stacked(self, prefix: str, suffixes: tuple[str, ...]) -> Placement | None:
        if self._spec.moe is None:
            return None
        experts = range(self._spec.moe.num_experts)
        names = tuple(f"{prefix}mlp.experts.{e}.{s}" for e in experts for s in suffixes)
        if names[0] not in self.parts:
            return None
        parts = [self.parts[n] for n in names]
        rows = sum(p.num_rows for p in parts[: len(suffixes)])
        shape = (len(experts), rows, *parts[0].row_shape)
        return Placement(names, (shape,), tuple(_copies(parts)))

    def _place_qkv(self, names: tuple[str, ...], *, interleaved: bool) -> Placement:
        plain = self._place_rows(names)
        if not interleaved:
            return plain
        spec = self._spec
        kv_heads, dim = spec.num_key_value_heads, spec.head_dim
        group = spec.num_attention_heads // kv_heads
        by_head = (kv_heads, group + 2, dim, spec.hidden_size)
        q, k, v = (self.parts[n] for n in names)
        pieces = (
            Part(p.parameter, p.start + h * n, p.start + (h + 1) * n, p.row_shape)
            for h in range(kv_heads)
            for p, n in ((q, group * dim), (k, dim), (v, dim))
        )
        return Placement(names, (*plain.shapes, by_head), tuple(_copies(pieces)))


def uses_old_hunyuan_names(names: Iterable[str]) -> bool:
    """Whether any name is of the old Hunyuan family, whose 2-D qkv_proj is interleaved."""
    return any(mark in name for name in names for mark in _OLD_HUNYUAN)


def _split(suffix: str) -> tuple[str, ...]:
    """The parts a tensor holds, by the name after `model.layers.{i}.`."""
    if suffix in _MODULES:
        return _MODULES[suffix]
    match = _FFN.fullmatch(suffix)
    if match is None:
        return (suffix,)
    module = match[1].replace("shared_experts.", "shared_mlp.")
    return tuple(module + leaf for leaf in _PAIRS.get(match[2], (match[2],)))


def _copies(parts: Iterable[Part]) -> Iterator[RowCopy]:
    source = 0
    for p in parts:
        yield RowCopy(source, p.parameter, p.expert, p.start, p.num_rows)
        source += p.num_rows


def _needed_parts(spec: ModelSpec, num_mtp_layers: int) -> Iterator[tuple[str, Part]]:
    hidden = (spec.hidden_size,)
    yield _whole("model.embed_tokens.weight", spec.vocab_size, hidden)
    yield _whole("model.norm.weight", spec.hidden_size)
    if not spec.tie_word_embeddings:
        yield _whole("lm_head.weight", spec.vocab_size, hidden)
    for i, is_moe in enumerate(spec.moe_layers):
        yield from _layer_parts(spec, i, is_moe)
    for i in range(spec.num_hidden_layers, spec.num_hidden_layers + num_mtp_layers):
        yield from _layer_parts(spec, i, spec.moe is not None)
        layer = f"model.layers.{i}."
        for name in ("enorm", "hnorm", "final_layernorm"):
            yield _whole(f"{layer}{name}.weight", spec.hidden_size)
        yield _whole(f"{layer}eh_proj.weight", spec.hidden_size, (2 * spec.hidden_size,))


def _layer_parts(spec: ModelSpec, index: int, is_moe: bool) -> Iterator[tuple[str, Part]]:
    layer = f"model.layers.{index}."
    attention = f"{layer}self_attn."
    dim, hidden = spec.head_dim, (spec.hidden_size,)
    q_rows, kv_rows = spec.num_attention_heads * dim, spec.num_key_value_heads * dim
    yield _whole(f"{layer}input_layernorm.weight", spec.hidden_size)
    yield _whole(f"{layer}post_attention_layernorm.weight", spec.hidden_size)
    yield _whole(f"{attention}o_proj.weight", spec.hidden_size, (q_rows,))
    yield _whole(f"{attention}q_norm.weight", dim)
    yield _whole(f"{attention}k_norm.weight", dim)
    start = 0
    for name, rows in ((_Q, q_rows), (_K, kv_rows), (_V, kv_rows)):
        part = Part(f"{attention}qkv_proj.weight", start, start + rows, hidden)
        yield layer + name, part
        start += rows
    if is_moe:
        yield from _moe_parts(spec, layer)
    else:
        mlp = f"{layer}mlp."
        yield from _swiglu_parts(mlp, mlp, spec.intermediate_size, spec.hidden_size)


def _moe_parts(spec: ModelSpec, layer: str) -> Iterator[tuple[str, Part]]:
    moe = spec.moe
    assert moe is not None
    gate = Part(f"{layer}mlp.gate.weight", 0, moe.num_experts, (spec.hidden_size,))
    yield layer + _ROUTER, gate
    if moe.has_expert_bias:
        yield _whole(layer + _BIAS, moe.num_experts)
    if moe.num_shared_experts:
        yield from _swiglu_parts(
            f"{layer}mlp.shared_mlp.",
            f"{layer}mlp.shared_experts.",
            moe.shared_intermediate_size,
            spec.hidden_size,
        )
    stacked = f"{layer}mlp.experts."
    for e in range(moe.num_experts):
        yield from _swiglu_parts(
            f"{stacked}{e}.", stacked, moe.intermediate_size, spec.hidden_size, expert=e
        )


def _swiglu_parts(
    names: str, module: str, intermediate: int, hidden: int, expert: int | None = None
) -> Iterator[tuple[str, Part]]:
    suffix = "" if expert is not None else ".weight"
    gate_up, down = f"{module}gate_up_proj{suffix}", f"{module}down_proj{suffix}"
    yield names + _GATE, Part(gate_up, 0, intermediate, (hidden,), expert)
    yield names + _UP, Part(gate_up, intermediate, 2 * intermediate, (hidden,), expert)
    yield names + _DOWN, Part(down, 0, hidden, (intermediate,), expert)


def _whole(name: str, rows: int, row_shape: tuple[int, ...] = ()) -> tuple[str, Part]:
    return name, Part(name, 0, rows, row_shape)
