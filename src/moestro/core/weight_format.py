"""How the numbers of a weight are kept: WeightFormat, and which weight of a model has which."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FLOAT_FORMATS = tuple(FLOAT_BYTES)
INTEGER_FORMATS = ("w8a8", "w4a8")
GROUP_SIZES = (32, 64, 128)
"""Weights along K that may share a scale in w4a8."""
_SCALE_BYTES = 4
HEAD = "lm_head.weight"
# Tencent's own quantised checkpoints keep it as it is, and only drafting reads it.
_NEVER_QUANTIZED = ("eh_proj.weight",)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a weight's numbers are kept.

    name: float32, bfloat16, float16; w8a8 (int8, one scale a row), w4a8 (4 bits, one scale a
    group), both multiplied with activations that are quantised to int8 per token as they come;
    fp8 (E4M3, decoded exactly, activations as they are).
    group_size: weights along K that share a scale; 0 is the whole row.
    has_zeros: each group has a zero point of its own (w4a8 only).
    fp32_scales: the scales need more than bfloat16's 16 bits (w4a8 only; the others keep 32).
    """

    name: str
    group_size: int = 0
    has_zeros: bool = False
    fp32_scales: bool = False

    @property
    def is_float(self) -> bool:
        return self.name in FLOAT_FORMATS

    def num_groups(self, in_features: int) -> int:
        """Scales in a row of in_features weights; the last group may be short."""
        return 1 if self.group_size == 0 else -(-in_features // self.group_size)

    def row_bytes(self, in_features: int) -> int:
        """Bytes of one row as it is packed, scales and zeros included, padding not."""
        if self.is_float:
            return in_features * FLOAT_BYTES[self.name]
        codes = in_features // 2 if self.name == "w4a8" else in_features
        narrow = self.name == "w4a8" and not self.fp32_scales
        scale_bytes = 2 if narrow else _SCALE_BYTES
        return codes + self.num_groups(in_features) * (scale_bytes + self.has_zeros)

    def __str__(self) -> str:
        group = f" g{self.group_size}" if self.group_size else ""
        return f"{self.name}{group}{' with zeros' * self.has_zeros}"


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The format of every weight matrix of a model, by parameter name.

    plain: what is not quantised; linear: projections and experts; head: the language-model head;
    exceptions win over all of these. Norms, the router, its bias and the embedding table are no
    matter of this: they are plain tensors.
    """

    plain: WeightFormat
    linear: WeightFormat
    head: WeightFormat
    exceptions: Mapping[str, WeightFormat] = field(default_factory=dict)

    @classmethod
    def all_float(cls, dtype: str) -> "WeightFormats":
        """Every weight in one float type."""
        plain = WeightFormat(dtype)
        return cls(plain, plain, plain)

    def of(self, parameter: str) -> WeightFormat:
        """The format of the parameter of this name."""
        if parameter in self.exceptions:
            return self.exceptions[parameter]
        if parameter == HEAD:
            return self.head
        return self.plain if parameter.endswith(_NEVER_QUANTIZED) else self.linear

    def with_exceptions(self, found: Mapping[str, WeightFormat]) -> "WeightFormats":
        """The same, but the formats found win."""
        differing = {name: f for name, f in found.items() if self.of(name) != f}
        return replace(self, exceptions={**self.exceptions, **differing})
