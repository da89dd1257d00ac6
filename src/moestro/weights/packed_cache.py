"""Packed weights on disk: written once, mapped at the next start instead of being packed again.

A file holds every parameter of one model in its final layout, under a key made of everything that
shapes those bytes. It is written under a temporary name, synced and renamed, so that a reader sees
a whole file or none; what does not check out is packed again. A writer holds a lock on the
temporary file: who finds it locked packs for itself, who finds it unlocked deletes what a process
that died left behind. Files used longest ago are deleted first when the budget is exceeded.

    magic 16 bytes | length of the header, 8 bytes | SHA-256 of the header, 32 bytes | header, JSON
    | data: each tensor at a multiple of ALIGNMENT
"""

import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from moestro.layers.parameters import Parameter

logger = logging.getLogger(__name__)

MAGIC = b"moestro weights\n"
VERSION = 2
"""Of this layout; it is part of every key."""
ALIGNMENT = 4096
FOLDER = "weights"
"""Under cache_dir."""
_SUFFIX, _PARTIAL = ".weights", ".partial"
_PREFIX_BYTES = len(MAGIC) + 8 + 32
_MAX_HEADER_BYTES = 1 << 26
_BLOCK_BYTES, _RUN_BLOCKS = 4096, 1 << 15
"""A digest is made of the sums of blocks, a run of them at a time."""


@dataclass(frozen=True, slots=True)
class CachedFile:
    """One file of the cache. used: when it was last written or mapped, seconds since the epoch."""

    path: Path
    num_bytes: int
    used: float


class PackedCache:
    """The packed weights under one folder. budget_bytes: of all its files together."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes

    def attach(self, key: str, weights: Mapping[str, Parameter]) -> bool:
        """Let the parameters be those of the file; False when there is none that can be used.

        Each tensor takes over the mapped memory. A file that is damaged is deleted.
        """
        path = self._path(key)
        tensors = dict(named_tensors(weights))
        try:
            with _open_plain(path, os.O_RDONLY, "rb") as file:
                header, data_start = _read_header(file, key)
                mapping = _map(file)
            views = _views(header, tensors, mapping, data_start)
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            logger.warning("%s can't be used (%s): packing the weights again", path, error)
            with suppress(OSError):
                path.unlink()
            return False
        for name, view in views.items():
            tensors[name].set_(  # the same tensor object, so that layers see it
                view.untyped_storage(), view.storage_offset(), view.shape, view.stride()
            )
        with suppress(OSError):
            os.utime(path)
        return True

    def write(self, key: str, weights: Mapping[str, Parameter]) -> bool:
        """Write the parameters; False, with a line in the log, when that was not possible."""
        tensors = dict(named_tensors(weights))
        entries, num_bytes = _layout(tensors)
        header = _header_bytes(key, entries, num_bytes)
        total = _aligned(_PREFIX_BYTES + len(header)) + num_bytes
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not self._make_room(total):
                return False
            with self._partial(key) as file:
                if file is None:
                    logger.info("packed weights are not cached: %s is being written", key)
                    return False
                _write(file, header, entries, tensors, total)
                os.replace(self._folder / f"{key}{_PARTIAL}", self._path(key))
            _sync_folder(self._folder)
        except OSError as error:
            logger.warning("packed weights are not cached in %s: %s", self._folder, error)
            return False
        return True

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"

    @contextmanager
    def _partial(self, key: str) -> Iterator[BinaryIO | None]:
        """The temporary file, locked; None when another process is writing it."""
        path = self._folder / f"{key}{_PARTIAL}"
        with _open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield None
                return
            try:
                # What the name leads to may have been renamed or deleted before the lock was ours.
                ours = path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno()))
                if ours:
                    file.truncate(0)
                yield file if ours else None
            except BaseException:
                with suppress(OSError):
                    path.unlink()
                raise

    def _make_room(self, wanted: int) -> bool:
        """Delete what a dead writer left, then the files used longest ago, until `wanted` fits."""
        for path in self._folder.glob(f"*{_PARTIAL}"):
            _delete_if_unlocked(path)
        if wanted > self._budget_bytes:
            logger.info(
                "packed weights of %d bytes are not cached: weight_cache_bytes is %d",
                wanted,
                self._budget_bytes,
            )
            return False
        files = sorted(cached_files(self._folder), key=lambda f: f.used)
        excess = sum(f.num_bytes for f in files) + wanted - self._budget_bytes
        for file in files:
            if excess <= 0:
                break
            with suppress(OSError):
                file.path.unlink()
            excess -= file.num_bytes
        free = shutil.disk_usage(self._folder).free
        if free < wanted:
            logger.warning(
                "packed weights of %d bytes are not cached: %s has %d bytes free",
                wanted,
                self._folder,
                free,
            )
        return free >= wanted


def cached_files(folder: Path) -> list[CachedFile]:
    """The files of a cache folder, complete ones only; () when there is no such folder."""
    found = []
    for path in folder.glob(f"*{_SUFFIX}"):
        with suppress(OSError):
            stat = path.stat()
            found.append(CachedFile(path, stat.st_size, stat.st_mtime))
    return found


def clear(folder: Path) -> int:
    """Delete the cached weights, but what is being written; the bytes freed.

    Who has a file mapped keeps it.
    """
    freed = 0
    for file in cached_files(folder):
        with suppress(OSError):
            file.path.unlink()
            freed += file.num_bytes
    for path in folder.glob(f"*{_PARTIAL}"):
        _delete_if_unlocked(path)
    return freed


def cache_key(facts: Mapping[str, Any]) -> str:
    """The name of what was made under these facts: a digest of them and of this layout."""
    text = json.dumps({"version": VERSION, **facts}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def named_tensors(weights: Mapping[str, Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the parameters, a weight's parts under names of their own."""
    for name, parameter in weights.items():
        if isinstance(parameter, torch.Tensor):
            yield name, parameter
            continue
        parts = (
            ("codes", parameter.codes),
            ("scales", parameter.scales),
            ("zeros", parameter.zeros),
        )
        for part, tensor in parts:
            if tensor is not None:
                yield f"{name}:{part}", tensor


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _digest(data: torch.Tensor) -> str:
    """Digest of bytes that lie at a multiple of 8, at 14 GB/s a core.

    SHA-256 (1.5 GB/s) of what 64-bit words add up to in each block, and of the bytes past the last
    whole one. It tells a flipped bit, a hole and a block in another's place, not an attack.
    """
    digest = hashlib.sha256()
    whole = len(data) // _BLOCK_BYTES * _BLOCK_BYTES
    words = data[:whole].view(torch.int64).view(-1, _BLOCK_BYTES // 8)
    for run in words.split(_RUN_BLOCKS):
        digest.update(run.sum(1).numpy().data)
    digest.update(data[whole:].numpy().data)
    return digest.hexdigest()


def _layout(tensors: Mapping[str, torch.Tensor]) -> tuple[list[dict[str, Any]], int]:
    entries, offset = [], 0
    for name, tensor in tensors.items():
        entries.append(
            {
                "name": name,
                "dtype": str(tensor.dtype),
                "shape": list(tensor.shape),
                "offset": offset,
                "bytes": tensor.nbytes,
                "digest": _digest(_bytes_of(tensor)),
            }
        )
        offset = _aligned(offset + tensor.nbytes)
    return entries, offset


def _header_bytes(key: str, entries: list[dict[str, Any]], num_bytes: int) -> bytes:
    header = {"version": VERSION, "key": key, "data_bytes": num_bytes, "tensors": entries}
    return json.dumps(header).encode()


def _write(
    file: BinaryIO,
    header: bytes,
    entries: list[dict[str, Any]],
    tensors: Mapping[str, torch.Tensor],
    total: int,
) -> None:
    file.write(MAGIC + struct.pack("<Q", len(header)) + hashlib.sha256(header).digest() + header)
    start = _aligned(_PREFIX_BYTES + len(header))
    position = _PREFIX_BYTES + len(header)
    for entry in entries:
        file.write(b"\0" * (start + entry["offset"] - position))
        if entry["bytes"]:
            file.write(_bytes_of(tensors[entry["name"]]).numpy().data)
        position = start + entry["offset"] + entry["bytes"]
    file.write(b"\0" * (total - position))
    file.flush()
    os.fsync(file.fileno())


def _read_header(file: BinaryIO, key: str) -> tuple[dict[str, Any], int]:
    """The checked header and where the data begins. Raises ValueError."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(_PREFIX_BYTES)
    if len(prefix) < _PREFIX_BYTES or not prefix.startswith(MAGIC):
        raise ValueError("not a file of packed weights")
    (length,) = struct.unpack_from("<Q", prefix, len(MAGIC))
    if length > min(_MAX_HEADER_BYTES, size):
        raise ValueError("its header is damaged")
    raw = file.read(length)
    if hashlib.sha256(raw).digest() != prefix[-32:]:
        raise ValueError("its header is damaged")
    header: dict[str, Any] = json.loads(raw)
    if header["version"] != VERSION or header["key"] != key:
        raise ValueError("it is of another version")
    start = _aligned(_PREFIX_BYTES + length)
    if size != start + header["data_bytes"]:
        raise ValueError(f"it has {size} bytes instead of {start + header['data_bytes']}")
    return header, start


def _views(
    header: dict[str, Any],
    tensors: Mapping[str, torch.Tensor],
    mapping: mmap.mmap,
    start: int,
) -> dict[str, torch.Tensor]:
    """A view of the mapped file for each tensor. Raises ValueError when one does not fit."""
    entries = {entry["name"]: entry for entry in header["tensors"]}
    if entries.keys() != tensors.keys():
        raise ValueError("it holds other tensors")
    views = {}
    for name, tensor in tensors.items():
        entry = entries[name]
        if (entry["dtype"], entry["shape"], entry["bytes"]) != (
            str(tensor.dtype), list(tensor.shape), tensor.nbytes
        ):  # fmt: skip
            raise ValueError(f"{name} is of another shape")
        if not tensor.nbytes:
            continue
        data = torch.frombuffer(
            mapping, dtype=torch.uint8, count=entry["bytes"], offset=start + entry["offset"]
        )
        if _digest(data) != entry["digest"]:
            raise ValueError(f"{name} is damaged")
        views[name] = data.view(tensor.dtype).view(tensor.shape)
    return views


def _map(file: BinaryIO) -> mmap.mmap:
    # Private and writable, so that torch takes it without a copy; nobody writes to it.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    mapping = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    if hasattr(mmap, "MADV_WILLNEED"):
        mapping.madvise(mmap.MADV_WILLNEED)
    return mapping


def _open_plain(path: Path, flags: int, mode: str) -> BinaryIO:
    """Open no link, whose target would be overwritten, and wait for no pipe's other end."""
    flags |= getattr(os, "O_NOFOLLOW", 0) | os.O_NONBLOCK | os.O_CLOEXEC
    return cast(BinaryIO, os.fdopen(os.open(path, flags, 0o666), mode))


def _delete_if_unlocked(path: Path) -> None:
    with suppress(OSError), _open_plain(path, os.O_RDONLY, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
