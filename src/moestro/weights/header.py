"""The header of a safetensors file, checked before anything trusts it.

A file is 8 bytes (little-endian length n), n bytes of JSON, then the data:
https://github.com/huggingface/safetensors#format. The JSON maps a tensor's name to dtype, shape
and data_offsets, and may hold __metadata__. As the format demands, the tensors' ranges cover the
data without hole or overlap, so a file cut short or grown is noticed when it is opened.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestro.errors import CheckpointError, shown

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_MAX_DIMENSIONS = 16
_LFS_POINTER = b"version "
"""How the text that Git LFS leaves in place of a file begins; no header is that long."""

DTYPE_BITS: Mapping[str, int] = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: dtype code, shape, and its byte range from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def read_header(path: Path) -> tuple[TensorEntry, ...]:
    """The tensors of a safetensors file in file order. Raises CheckpointError with the reason."""
    if path.exists() and not path.is_file():
        raise _bad(path, "is no regular file")
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            head = file.read(8)
            if len(head) < 8:
                raise _bad(path, f"{size} bytes long, too short for a safetensors file")
            (length,) = struct.unpack("<Q", head)
            if head == _LFS_POINTER:
                raise _bad(path, "a Git LFS pointer, not the weights: fetch them with git lfs pull")
            if length > MAX_HEADER_BYTES:
                raise _bad(
                    path,
                    f"header length {length} is above the format's limit {MAX_HEADER_BYTES}: "
                    "not a safetensors file, or corrupt",
                )
            if 8 + length > size:
                raise _bad(path, f"header of {length} bytes, but the file has {size}: truncated")
            raw = file.read(length)
    except OSError as error:
        raise _bad(path, f"can't be read: {error.strerror}") from error
    entries = [_entry(path, name, value) for name, value in _parse(path, raw).items()]
    data_start = 8 + length
    _check_cover(path, entries, size - data_start)
    return tuple(
        TensorEntry(e.name, e.dtype, e.shape, e.start + data_start, e.stop + data_start)
        for e in sorted(entries, key=lambda e: (e.start, e.stop))
    )


def _bad(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: {reason}")


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in pairs:
            if name in result:
                raise _bad(path, f"header names {shown(name)} twice: corrupt")
            result[name] = value
        return result

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"header is no valid JSON ({error}): corrupt") from error
    if not isinstance(header, dict):
        raise _bad(path, f"header is a JSON {type(header).__name__}, not an object: corrupt")
    header.pop("__metadata__", None)
    return header


def _entry(path: Path, name: str, value: Any) -> TensorEntry:
    where = f"tensor {shown(name)}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise _bad(path, f"{where} lacks dtype, shape or data_offsets: corrupt header")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _bad(path, f"{where} has the unknown dtype {shown(dtype)}")
    if not _is_sizes(shape):
        raise _bad(path, f"{where} has the impossible shape {shown(shape)}: corrupt header")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(
            path, f"{where} has the impossible data_offsets {shown(offsets)}: corrupt header"
        )
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or bits // 8 != offsets[1] - offsets[0]:
        raise _bad(
            path,
            f"{where} of {dtype} {shape} needs {-(-bits // 8)} bytes, but data_offsets {offsets} "
            f"give it {offsets[1] - offsets[0]}: corrupt header",
        )
    return TensorEntry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _is_sizes(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        return False
    return all(type(v) is int and 0 <= v < 2**63 for v in value)


def _check_cover(path: Path, entries: list[TensorEntry], data_bytes: int) -> None:
    end, before = 0, ""
    for e in sorted(entries, key=lambda e: (e.start, e.stop)):
        if e.start < end:
            raise _bad(path, f"tensors {shown(before)} and {shown(e.name)} overlap: corrupt header")
        if e.start > end:
            raise _bad(path, f"{e.start - end} bytes before tensor {shown(e.name)} belong to none")
        end, before = e.stop, e.name
    if end > data_bytes:
        raise _bad(
            path,
            f"tensor {shown(before)} ends at byte {end} of the data, but the file holds "
            f"{data_bytes}: truncated, or still being written",
        )
    if end < data_bytes:
        raise _bad(path, f"{data_bytes - end} bytes after the last tensor belong to none: corrupt")
