"""Checkpoint: the tensors of a folder of safetensors files, memory-mapped."""

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from moestro.core.model_spec import ModelSpec
from moestro.errors import CheckpointError, shown
from moestro.weights.header import TensorEntry, read_header

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_MTP_SKIPPED = ("shared_head.", "embed_tokens.")


class Checkpoint:
    """Names, shapes, dtypes and lazily mapped data of every tensor.

    Opening reads and checks the headers only. A file is mapped once, on the first tensor asked of
    it; no byte is copied to anonymous memory. Single-threaded.
    """

    def __init__(self, model_dir: Path, files: dict[Path, tuple[TensorEntry, ...]]) -> None:
        self.model_dir = model_dir
        self._files = files
        self._maps: dict[Path, mmap.mmap] = {}
        self._entries: dict[str, tuple[Path, TensorEntry]] = {}
        for path, entries in files.items():
            for entry in entries:
                if entry.name in self._entries:
                    other = self._entries[entry.name][0].name
                    raise CheckpointError(
                        f"{model_dir}: tensor {shown(entry.name)} is in {other} and in {path.name}"
                    )
                self._entries[entry.name] = (path, entry)

    @classmethod
    def open(cls, model_dir: Path) -> "Checkpoint":
        """Find the files of a folder and check their headers.

        model.safetensors, else the files its index names, else every *.safetensors. Raises
        CheckpointError: nothing there, a file missing, truncated or corrupt, an index that
        disagrees with the files, a tensor in two files.
        """
        if (model_dir / _SINGLE).is_file():
            return cls(model_dir, _headers([model_dir / _SINGLE]))
        if (model_dir / _INDEX).is_file():
            weight_map = _read_index(model_dir / _INDEX)
            files = [model_dir / name for name in sorted(set(weight_map.values()))]
            checkpoint = cls(model_dir, _headers(files))
            checkpoint._check_index(weight_map)
            return checkpoint
        files = sorted(model_dir.glob("*.safetensors"))
        if not files:
            raise CheckpointError(_nothing_found(model_dir))
        return cls(model_dir, _headers(files))

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(self._files)

    def names(self) -> tuple[str, ...]:
        """All names, file by file, in the order of the data: reading in it reads each file once."""
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name][1].shape

    def dtype(self, name: str) -> str:
        """The format's code: F32, BF16, F16, F8_E4M3, ..."""
        return self._entries[name][1].dtype

    def num_bytes(self, name: str) -> int:
        return self._entries[name][1].num_bytes

    def file_name(self, name: str) -> str:
        return self._entries[name][0].name

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor over the mapping itself; writing to it never reaches the file.

        Raises CheckpointError when torch has no such dtype, or the file changed its size.
        """
        path, entry = self._entries[name]
        if entry.dtype not in _DTYPES:
            raise CheckpointError(
                f"{path}: tensor {shown(name)} is {entry.dtype}, which torch lacks"
            )
        dtype = _DTYPES[entry.dtype]
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        data = torch.frombuffer(
            self._mapping(path), dtype=torch.uint8, count=entry.num_bytes, offset=entry.start
        )
        if entry.start % dtype.itemsize:
            # Only writers that don't pad their header do this; torch needs aligned data.
            data = data.clone()
        return data.view(dtype).view(entry.shape)

    def release(self, name: str) -> None:
        """Drop the tensor's pages from this process; the kernel's cache keeps them if it likes."""
        path, entry = self._entries[name]
        mapping = self._maps.get(path)
        if mapping is None or not hasattr(mmap, "MADV_DONTNEED") or entry.num_bytes == 0:
            return
        start = entry.start - entry.start % mmap.PAGESIZE
        mapping.madvise(mmap.MADV_DONTNEED, start, entry.stop - start)

    def has_mtp(self, spec: ModelSpec) -> bool:
        """Whether any tensor of the MTP layers the config promises is here."""
        first = spec.num_hidden_layers
        prefixes = tuple(f"model.layers.{first + i}." for i in range(spec.num_mtp_layers))
        return any(
            name.startswith(p) and not name[len(p) :].startswith(_MTP_SKIPPED)
            for p in prefixes
            for name in self._entries
        )

    def close(self) -> None:
        """Forget the mappings; each goes when its last tensor does."""
        self._maps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _mapping(self, path: Path) -> mmap.mmap:
        mapping = self._maps.get(path)
        if mapping is None:
            mapping = self._maps[path] = _map(path)
        size = mapping.size()
        if size != len(mapping) or size != self._checked_size(path):
            raise CheckpointError(f"{path}: the file changed its size while it was being read")
        return mapping

    def _checked_size(self, path: Path) -> int:
        entries = self._files[path]
        return entries[-1].stop if entries else 0

    def _check_index(self, weight_map: dict[str, str]) -> None:
        wrong = [
            f"{name} (in {file})"
            for name, file in weight_map.items()
            if name not in self._entries or self._entries[name][0].name != file
        ]
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise CheckpointError(
                f"{self.model_dir / _INDEX}: names tensors that are not in the file it says: "
                + ", ".join(wrong[:5])
                + more
            )


def _headers(files: list[Path]) -> dict[Path, tuple[TensorEntry, ...]]:
    return {path: read_header(path) for path in files}


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no valid JSON: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no weight_map of tensor names to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{path}: {shown(name)} maps to {shown(file)}, which is no file name"
            )
    missing = sorted(f for f in set(weight_map.values()) if not (path.parent / f).is_file())
    if missing:
        raise CheckpointError(
            f"{path}: names {len(missing)} files that are not there: {', '.join(missing[:5])}"
            + (", ..." if len(missing) > 5 else "")
        )
    return weight_map


def _nothing_found(model_dir: Path) -> str:
    if not model_dir.is_dir():
        return f"{model_dir}: no such folder"
    pickles: Iterator[Path] = model_dir.glob("*.bin")
    if any(pickles):
        return f"{model_dir}: only pickled weights (*.bin) are here; save them as safetensors"
    return f"{model_dir}: no *.safetensors file"


def _map(path: Path) -> mmap.mmap:
    # Private and writable, so that torch takes it without a copy; NORESERVE keeps the kernel from
    # counting a mapping that nobody writes to against the memory it may promise.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(
                file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: can't be memory-mapped: {error}") from error
    if hasattr(mmap, "MADV_SEQUENTIAL"):
        mapping.madvise(mmap.MADV_SEQUENTIAL)
    return mapping
