"""quantization_config of a checkpoint's config.json: which weights are quantised, and how.

Read: compressed-tensors (int-quantized W8A8; pack-quantized W4A16 and W4A8; float-quantized FP8 per
tensor, channel or block) and quant_method fp8 (Hy3-FP8: per tensor, or in blocks where
weight_block_size says so; Qwen and DeepSeek FP8: blocks). Anything else is refused with its value.
Sources: the compressed-tensors library's config classes, transformers' FineGrainedFP8Config, and
the released checkpoints of Hy3-FP8 and Qwen3-30B-A3B-FP8.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moestro.core.config_reader import ConfigReader
from moestro.core.weight_format import GROUP_SIZES, WeightFormat
from moestro.errors import CheckpointError, UnsupportedError, shown

_READ = "compressed-tensors and fp8"
_CT_FORMATS = {"int-quantized": "w8a8", "pack-quantized": "w4a8", "float-quantized": "fp8"}
_CT_ALSO = {"naive-quantized": "float-quantized"}
_BITS = {"w8a8": (8, "int"), "w4a8": (4, "int"), "fp8": (8, "float")}
_STRATEGIES = {
    "w8a8": ("channel",),
    "w4a8": ("group", "channel"),
    "fp8": ("tensor", "channel", "block"),
}
_WEIGHT_HARMLESS = (
    "observer", "observer_kwargs", "scale_dtype", "zp_dtype",
)  # fmt: skip
_NO_BLOCK = (0, 0)


@dataclass(frozen=True, slots=True)
class StoredScheme:
    """How one group of weights is stored.

    name: w8a8, w4a8 or fp8. strategy: what shares a scale: tensor, channel (a row), group (of
    group_size along K) or block (rows, columns).
    """

    name: str
    strategy: str
    group_size: int = 0
    block: tuple[int, int] = _NO_BLOCK
    has_zeros: bool = False

    def format_for(self, in_features: int) -> WeightFormat:
        """The run-time format of a weight with this many columns; its scales are repeated.

        Raises UnsupportedError for groups that none of the run-time sizes divides.
        """
        if self.name == "w8a8":
            return WeightFormat("w8a8")
        if self.name == "fp8":
            return WeightFormat("fp8", self.block[1])
        stored = self.group_size or in_features
        for size in reversed(GROUP_SIZES):
            if stored % size == 0 and in_features % size == 0:
                return WeightFormat("w4a8", size, self.has_zeros)
        raise UnsupportedError(
            f"4-bit weights of {in_features} columns in groups of {stored} can't be computed: "
            f"a group must be a multiple of {GROUP_SIZES[0]}, and the columns of the group."
        )

    def scale_shapes(self, rows: int, in_features: int) -> tuple[tuple[int, ...], ...]:
        """Shapes that the scale tensor of a [rows, in_features] weight may have."""
        if self.strategy == "tensor":
            return ((), (1,), (1, 1))
        if self.strategy == "channel":
            return ((rows, 1), (rows,))
        if self.strategy == "group":
            return ((rows, -(-in_features // self.group_size)),)
        high, wide = self.block
        return ((-(-rows // high), -(-in_features // wide)),)


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """What a checkpoint says of its quantised weights.

    groups: (targets, scheme) in order; a target is a module's name, `re:` and a pattern, or the
    class name Linear. ignored: modules that stay as they are. notes: what runs otherwise than the
    checkpoint's writer may expect.
    """

    method: str
    groups: tuple[tuple[tuple[str, ...], StoredScheme], ...]
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def scheme_of(self, module: str) -> StoredScheme | None:
        """How the module's weight should be stored; None: it is not quantised."""
        if any(_names(entry, module) for entry in self.ignored):
            return None
        for targets, scheme in self.groups:
            if any(target == "Linear" or _names(target, module) for target in targets):
                return scheme
        return None

    def scheme_found(self, module: str, name: str) -> StoredScheme | None:
        """The scheme of a module that turned out to be stored as `name` (w8a8, w4a8, fp8)."""
        expected = self.scheme_of(module)
        if expected is not None:
            return expected if expected.name == name else None
        alike = {scheme for _, scheme in self.groups if scheme.name == name}
        return alike.pop() if len(alike) == 1 else None


def _names(entry: str, module: str) -> bool:
    """Whether an entry of a list speaks of a module: by pattern, name, or a run of its steps."""
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    return f".{entry}." in f".{module}."


def read_quantization(found: Any) -> StoredQuantization | None:
    """The value of quantization_config; None when the checkpoint has none.

    Raises CheckpointError for contradictions and UnsupportedError for what is not read.
    """
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"config.json: quantization_config={shown(found)} is no object.")
    reader = ConfigReader(found, "config.json: quantization_config")
    method = reader.text("quant_method")
    if method == "compressed-tensors":
        made = _read_compressed_tensors(reader)
    elif method == "fp8":
        made = _read_fp8(reader)
    else:
        raise UnsupportedError(
            f"config.json: quantization_config with quant_method={shown(method)} is not supported; "
            f"read are {_READ}. A float checkpoint can be quantised at load with "
            "--quantization."
        )
    reader.refuse_unknown(("quantization_status", "global_compression_ratio", "version"))
    for entry in (*made.ignored, *(t for targets, _ in made.groups for t in targets)):
        _check_pattern(entry)
    return made


def _check_pattern(entry: str) -> None:
    if entry.startswith("re:"):
        try:
            re.compile(entry[3:])
        except re.error as error:
            raise CheckpointError(
                f"config.json: quantization_config: {shown(entry)} is no pattern: {error}."
            ) from None


def _read_fp8(reader: ConfigReader) -> StoredQuantization:
    """quant_method fp8. weight_block_size says blocks; without it there is one scale a tensor."""
    reader.require("fmt", "e4m3", "weights are E4M3")
    reader.require("dequantize", False, "the weights are kept as they are")
    reader.value("scale_fmt")  # powers of two or not: the tensors hold the values
    ignored = _words(reader, "ignored_layers") + _words(reader, "modules_to_not_convert")
    scheme = StoredScheme("fp8", "tensor")
    block = reader.value("weight_block_size")
    if block is not None:
        scheme = StoredScheme("fp8", "block", block=_block(reader, "weight_block_size", block))
    activation = reader.text("activation_scheme", "dynamic")
    if activation not in ("static", "dynamic"):
        raise reader.wrong("activation_scheme", "must be static or dynamic")
    notes = ["fp8 weights are multiplied with activations as they are, not rounded to fp8"]
    if activation == "static":
        notes.append("static activation scales (input_scale) are not used")
    if reader.has("kv_cache_scheme"):
        notes.append("KV scales of the checkpoint are not used")
    return StoredQuantization("fp8", ((("Linear",), scheme),), tuple(ignored), tuple(notes))


def _read_compressed_tensors(reader: ConfigReader) -> StoredQuantization:
    for key in ("sparsity_config", "transform_config"):
        if reader.value(key):
            raise UnsupportedError(
                f"{reader.where}: {key}={shown(reader.value(key))} is not supported: the weights "
                "would need more than their scales."
            )
    notes: list[str] = []
    if reader.has("kv_cache_scheme"):
        notes.append("KV scales of the checkpoint are not used")
    overall = reader.value("format")
    config_groups = reader.mapping("config_groups")
    if not config_groups:
        raise CheckpointError(f"{reader.where} lacks config_groups.")
    groups = []
    for name, value in config_groups.items():
        where = f"{reader.where}.config_groups.{name}"
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{where}={shown(value)} is no object.")
        groups.append(_read_group(ConfigReader(value, where), overall, notes))
    ignored = _words(reader, "ignore")
    return StoredQuantization("compressed-tensors", tuple(groups), tuple(ignored), tuple(notes))


def _read_group(
    group: ConfigReader, overall: Any, notes: list[str]
) -> tuple[tuple[str, ...], StoredScheme]:
    format_name = group.value("format") or overall
    format_name = _CT_ALSO.get(format_name, format_name) if isinstance(format_name, str) else None
    weights = group.mapping("weights")
    if weights is None:
        raise CheckpointError(f"{group.where} lacks weights.")
    reader = ConfigReader(weights, f"{group.where}.weights")
    if format_name not in _CT_FORMATS:
        raise UnsupportedError(
            f"{group.where}: format={shown(group.value('format') or overall)} is not supported; "
            f"{', '.join(_CT_FORMATS)} are."
        )
    scheme = _read_weights(reader, _CT_FORMATS[format_name])
    inputs = group.mapping("input_activations")
    _note_activations(scheme, inputs, notes)
    outputs = group.value("output_activations")
    if outputs:
        raise UnsupportedError(f"{group.where}: output_activations={shown(outputs)} is not done.")
    targets = _words(group, "targets")
    if not targets:
        raise CheckpointError(f"{group.where} lacks targets.")
    group.refuse_unknown(())
    return tuple(targets), scheme


def _read_weights(reader: ConfigReader, name: str) -> StoredScheme:
    bits, kind = _BITS[name]
    reader.require("num_bits", bits, f"{name} weights have {bits} bits")
    reader.require("type", kind, f"{name} weights are of type {kind}")
    reader.require("dynamic", False, "weights are quantised already")
    if reader.value("actorder") not in (None, False, "static", "weight"):
        raise UnsupportedError(
            f"{reader.where}: actorder={shown(reader.value('actorder'))} is not supported: columns "
            "in an order of their own (weight_g_idx) can't be read. Quantise with static act-order."
        )
    strategy = reader.text("strategy")
    if strategy not in _STRATEGIES[name]:
        raise UnsupportedError(
            f"{reader.where}: strategy={shown(strategy)} is not supported for {name} weights; "
            f"{', '.join(_STRATEGIES[name])} are."
        )
    symmetric = reader.boolean("symmetric", True)
    if not symmetric and name != "w4a8":
        raise UnsupportedError(
            f"{reader.where}: symmetric=false is not supported for {name} weights."
        )
    group_size, block = 0, _NO_BLOCK
    if strategy == "group":
        group_size = reader.integer("group_size")
    elif reader.value("group_size") not in (None, -1):
        raise reader.wrong("group_size", f"contradicts strategy={strategy}")
    found = reader.value("block_structure")
    if strategy == "block":
        block = _block(reader, "block_structure", found)
    elif found is not None:
        raise reader.wrong("block_structure", f"contradicts strategy={strategy}")
    reader.refuse_unknown(_WEIGHT_HARMLESS)
    return StoredScheme(name, strategy, group_size, block, not symmetric)


def _note_activations(
    scheme: StoredScheme, inputs: dict[str, Any] | None, notes: list[str]
) -> None:
    text = None
    if scheme.name == "fp8":
        text = "fp8 weights are multiplied with activations as they are, not rounded to fp8"
    elif inputs is None:
        text = f"{scheme.name}: activations are rounded to int8 per token; the checkpoint asks "
        text += "for 16 bits"
    elif inputs.get("num_bits") != 8 or inputs.get("type", "int") != "int":
        text = f"{scheme.name}: activations are rounded to int8 per token; the checkpoint asks "
        text += f"for {inputs.get('num_bits')} bits of type {inputs.get('type')}"
    elif not inputs.get("dynamic"):
        text = "static activation scales are not used: they are taken per token"
    if text is not None and text not in notes:
        notes.append(text)


def _block(reader: ConfigReader, key: str, value: Any) -> tuple[int, int]:
    if isinstance(value, str):  # how some writers spell it: 128x128
        value = [int(part) if part.isdigit() else part for part in value.split("x")]
    if (
        not isinstance(value, list)
        or len(value) != 2
        or any(isinstance(v, bool) or not isinstance(v, int) or v <= 0 for v in value)
    ):
        raise reader.wrong(key, "must be two whole numbers above 0")
    if value[1] % GROUP_SIZES[0]:
        raise UnsupportedError(
            f"{reader.where}: {key}={value} is not supported: blocks must be a multiple of "
            f"{GROUP_SIZES[0]} columns wide."
        )
    return value[0], value[1]


def _words(reader: ConfigReader, key: str) -> list[str]:
    value = reader.value(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise reader.wrong(key, "must be a list of names")
    return value
