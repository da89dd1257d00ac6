"""Stored weights: what a checkpoint's tensors mean, a weight's codes and scales taken together."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from moestro.core.quantization_config import StoredQuantization, StoredScheme
from moestro.errors import CheckpointError
from moestro.quant.format import WeightFormat, WeightTensor
from moestro.quant.int_group import pack_nibbles, unpack_nibbles
from moestro.weights.checkpoint import Checkpoint

_SCALES = ("weight_scale", "weight_scale_inv")
_COMPANIONS = (*_SCALES, "weight_zero_point", "weight_shape", "weight_g_idx")
_QUANTIZED = {"F8_E4M3": "fp8", "I8": "w8a8"}
_SCALE_DTYPES = ("F32", "BF16", "F16")
# Scales of activations and of cached keys and values, which are taken as they come here.
_UNUSED = (
    "input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "kv_scale", "q_scale",
    "k_cache.scale", "v_cache.scale", "q.scale",
)  # fmt: skip
_NIBBLES = 8
"""4-bit codes in one int32."""
_STACKED = "holding quantised experts in one stack (each expert's are read by themselves)"


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight of a checkpoint, under the name it would have unquantised.

    codes, scales, zeros: names of the tensors that hold it; scheme: None for a float tensor.
    """

    name: str
    shape: tuple[int, ...]
    codes: str
    scales: str | None = None
    zeros: str | None = None
    scheme: StoredScheme | None = None
    scale_dtype: str = "BF16"

    @property
    def format(self) -> WeightFormat | None:
        """Its run-time format; None for a float tensor. Raises UnsupportedError."""
        if self.scheme is None:
            return None
        made = self.scheme.format_for(self.shape[-1])
        return replace(made, fp32_scales=made.name == "w4a8" and self.scale_dtype != "BF16")

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(t for t in (self.codes, self.scales, self.zeros) if t is not None)


class StoredWeights:
    """All weights of a checkpoint by name, in the order of the data, and what is wrong with them.

    problems: (what, names) for the loader's report. unused: tensors that nothing here reads.
    """

    def __init__(self, checkpoint: Checkpoint, quantization: StoredQuantization | None) -> None:
        self.by_name: dict[str, StoredWeight] = {}
        self.unused: list[str] = []
        self._checkpoint = checkpoint
        self._quantization = quantization
        self._problems: dict[str, list[str]] = {}
        self._companions = set()
        if quantization is not None:
            self._companions = {
                n for n in checkpoint.names() if n.rpartition(".")[2] in _COMPANIONS
            }
        self._left = set(self._companions)
        for name in checkpoint.names():
            self._take(name)
        for name in sorted(self._left):
            self._problem("hold scales of a weight that is not quantised", name)

    @property
    def problems(self) -> tuple[tuple[str, list[str]], ...]:
        return tuple(self._problems.items())

    def _problem(self, what: str, name: str) -> None:
        self._problems.setdefault(what, []).append(name)

    def _take(self, name: str) -> None:
        checkpoint = self._checkpoint
        if name in self._companions:
            return
        shape = checkpoint.shape(name)
        if self._quantization is None:
            self.by_name[name] = StoredWeight(name, shape, name)
            return
        if any(name.endswith(f".{leaf}") for leaf in _UNUSED):
            self.unused.append(name)
            return
        if len(shape) == 3 and checkpoint.dtype(name) in (*_QUANTIZED, "I32"):
            self._problem(_STACKED, f"{name} {checkpoint.dtype(name)} {list(shape)}")
            self._left -= {n for n in self._left if n.startswith(name.removesuffix(".weight"))}
            return
        module, _, leaf = name.rpartition(".")
        kind = None
        if leaf == "weight_packed":
            kind = "w4a8"
            shape = (*shape[:-1], shape[-1] * _NIBBLES) if shape else shape
        elif leaf == "weight":
            kind = _QUANTIZED.get(checkpoint.dtype(name))
        logical = f"{module}.weight" if kind is not None else name
        stored = StoredWeight(logical, shape, name)
        if kind is not None:
            stored = self._quantized(stored, module, kind)
        self.by_name[logical] = stored

    def _quantized(self, plain: StoredWeight, module: str, kind: str) -> StoredWeight:
        assert self._quantization is not None
        name, shape = plain.codes, plain.shape
        own = {f"{module}.{leaf}" for leaf in _COMPANIONS}
        self._left -= own
        scheme = self._quantization.scheme_found(module, kind)
        if scheme is None:
            self._problem(f"stored as {kind}, which quantization_config does not say", name)
            return plain
        if len(shape) != 2 or (kind == "w4a8" and self._checkpoint.dtype(name) != "I32"):
            found = f"{name} {self._checkpoint.dtype(name)} {list(self._checkpoint.shape(name))}"
            self._problem(f"of a layout that {kind} does not have", found)
            return plain
        if f"{module}.weight_g_idx" in self._companions:
            self._problem("with columns in an order of their own (act-order, weight_g_idx)", name)
        scales = [n for n in (f"{module}.{leaf}" for leaf in _SCALES) if n in self._companions]
        if len(scales) != 1:
            self._problem("without its scales" if not scales else "with scales given twice", name)
            return plain
        self._check_scales(scales[0], scheme, shape)
        zeros = self._zeros(module, scheme, shape)
        scale_dtype = self._checkpoint.dtype(scales[0])
        return StoredWeight(plain.name, shape, name, scales[0], zeros, scheme, scale_dtype)

    def _check_scales(self, name: str, scheme: StoredScheme, shape: tuple[int, ...]) -> None:
        dtype, found = self._checkpoint.dtype(name), self._checkpoint.shape(name)
        if dtype not in _SCALE_DTYPES:
            self._problem(f"scales of a dtype other than {', '.join(_SCALE_DTYPES)}", name)
        allowed = scheme.scale_shapes(*shape)
        if found not in allowed:
            wanted = " or ".join(str(list(s)) for s in allowed)
            text = f"{name} is {list(found)}, {scheme.strategy} scales are {wanted}"
            self._problem("scales of a wrong shape", text)

    def _zeros(self, module: str, scheme: StoredScheme, shape: tuple[int, ...]) -> str | None:
        name = f"{module}.weight_zero_point"
        there = name in self._companions
        if not scheme.has_zeros:
            # Some writers store the zeros of a symmetric scheme too.
            if there and self._checkpoint.tensor(name).count_nonzero():
                self._problem("zero points of a symmetric scheme that are not 0", name)
            return None
        if not there:
            self._problem("without its zero points", f"{module}.weight_packed")
            return None
        groups = 1 if scheme.strategy == "channel" else -(-shape[1] // scheme.group_size)
        wanted = (-(-shape[0] // _NIBBLES), groups)
        if self._checkpoint.shape(name) != wanted or self._checkpoint.dtype(name) != "I32":
            found = f"{name} {self._checkpoint.dtype(name)} {list(self._checkpoint.shape(name))}"
            self._problem("zero points of a wrong layout", f"{found}, not I32 {list(wanted)}")
        return name


class OpenWeight:
    """The rows of one stored weight; leading dimensions are flattened.

    Raises CheckpointError, naming the tensor, when scales are NaN, infinite or, but for 4-bit
    codes, negative.
    """

    def __init__(self, checkpoint: Checkpoint, stored: StoredWeight) -> None:
        self._stored = stored
        self._format = stored.format
        codes = checkpoint.tensor(stored.codes)
        self._codes = codes.view(-1, codes.shape[-1]) if codes.dim() > 1 else codes
        self._scales: torch.Tensor | None = None
        self._zeros: torch.Tensor | None = None
        if stored.scheme is None or stored.scales is None:
            return
        rows, columns = stored.shape
        self._scales = _checked_scales(checkpoint, stored).expand_as_rows(rows)
        if stored.zeros is not None:
            packed = checkpoint.tensor(stored.zeros).T.contiguous().view(torch.uint8)
            self._zeros = unpack_nibbles(packed)[:, :rows].T
        if stored.scheme.name == "w4a8":
            self._repeat_groups(columns)

    def _repeat_groups(self, columns: int) -> None:
        assert self._format is not None
        assert self._scales is not None
        times = self._format.num_groups(columns) // self._scales.shape[1]
        if times > 1:
            self._scales = self._scales.repeat_interleave(times, dim=1)
            if self._zeros is not None:
                self._zeros = self._zeros.repeat_interleave(times, dim=1)

    def rows(self, start: int, stop: int) -> torch.Tensor | WeightTensor:
        """Rows [start, stop): a float tensor over the mapping itself, or a WeightTensor."""
        codes = self._codes[start:stop]
        if self._format is None or self._scales is None:
            return codes
        if self._format.name == "w4a8":
            # Eight codes an int32, offset by 8, the lowest column in the lowest bits: the rows
            # layout, as a little-endian machine reads it.
            codes = codes.contiguous().view(torch.uint8)
        shape = (len(codes), self._stored.shape[1])
        scales = self._scales[start:stop].contiguous()
        zeros = None if self._zeros is None else self._zeros[start:stop].contiguous()
        return WeightTensor(self._format, shape, codes, scales, zeros)


@dataclass(frozen=True, slots=True)
class _Scales:
    values: torch.Tensor
    scheme: StoredScheme

    def expand_as_rows(self, rows: int) -> torch.Tensor:
        """fp32 [rows, groups]."""
        if self.scheme.strategy == "tensor":
            return self.values.reshape(1, 1).expand(rows, 1)
        if self.scheme.strategy == "channel":
            return self.values.reshape(rows, 1)
        if self.scheme.strategy == "block":
            return self.values.repeat_interleave(self.scheme.block[0], dim=0)[:rows]
        return self.values


def _checked_scales(checkpoint: Checkpoint, stored: StoredWeight) -> _Scales:
    assert stored.scales is not None
    assert stored.scheme is not None
    values = checkpoint.tensor(stored.scales).float()
    wrong = ~torch.isfinite(values)
    if stored.scheme.name != "w4a8":
        wrong |= values < 0
    if wrong.any():
        value = values[wrong][0].item()
        raise CheckpointError(
            f"tensor {stored.scales!r} holds the scale {value:g}, {int(wrong.sum())} of "
            f"{values.numel()} are no scales: the checkpoint is damaged"
        )
    return _Scales(values, stored.scheme)


def pack_int32(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 [M, K], K a multiple of 8, as checkpoints store them: int32 [M, K / 8]."""
    return pack_nibbles(codes).view(torch.int32)


def blocks(num_rows: int, columns: int, elements: int, multiple: int = 64) -> Iterator[range]:
    """Runs of rows of about `elements` elements, each but the last a multiple of `multiple`."""
    size = max(1, elements // max(1, columns) // multiple) * multiple
    for start in range(0, num_rows, size):
        yield range(start, min(start + size, num_rows))
