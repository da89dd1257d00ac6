"""WeightsDigest: what is in a checkpoint's files, byte for byte, for names that outlive a process.

XXH3-128 of each file, which tells a fine-tune from its base and one edit from none; not an attack.
A record of a file's digest is kept under cache_dir, by everything that the file system says of the
file and by its header, so that a second start reads nothing.
"""

import hashlib
import json
import logging
import os
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from moestro.weights.header import MAX_HEADER_BYTES

logger = logging.getLogger(__name__)

FOLDER = "digests"
"""Under cache_dir."""
MAX_RECORDS = 4096
_READ_BYTES = 1 << 22
_HEX_CHARS = 32
# A file's times tell two writes apart only when a tick of its clock lies between them: that of the
# system's timer, or two seconds where a file system keeps whole ones.
_TICK_NS, _COARSE_TICK_NS = 20_000_000, 2_000_000_000


class WeightsChangedError(ValueError):
    """A file is no longer what it was when the digest was asked for."""


@dataclass(frozen=True, slots=True)
class FileState:
    """What tells one state of a file from another without reading it whole.

    The time of the inode's change is among it: unlike that of the data it can't be set, so that
    weights written in place and dated back are noticed. header: SHA-256 of a safetensors header.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    header: str

    @classmethod
    def of(cls, path: Path) -> "FileState":
        """As it is now. Raises OSError."""
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            head += file.read(min(length, MAX_HEADER_BYTES))
        times = (stat.st_mtime_ns, stat.st_ctime_ns)
        header = hashlib.sha256(head).hexdigest()
        return cls(stat.st_dev, stat.st_ino, stat.st_size, *times, header)

    @classmethod
    def settled(cls, path: Path) -> "FileState":
        """As `of`, once a write that comes later can't leave the times as they are; waits for at
        most a tick. Raises OSError."""
        time.sleep(max(0.0, min(cls.of(path).unsettled_ns, _COARSE_TICK_NS) / 1e9))
        return cls.of(path)

    @property
    def unsettled_ns(self) -> int:
        """For so long another write may give the file the same times; 0 or less: no more."""
        is_coarse = self.ctime_ns % 1_000_000_000 == 0
        tick_ns = _COARSE_TICK_NS if is_coarse else _TICK_NS
        return self.ctime_ns + tick_ns - time.time_ns()

    @property
    def record_name(self) -> str:
        """The record's file name."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


class WeightsDigest:
    """The digest of the files as they are when this is made: make it before they are read."""

    def __init__(self, files: Iterable[Path], cache_dir: Path) -> None:
        """Raises OSError when a file can't be read."""
        self._files = tuple(sorted(files))
        self._states = tuple(FileState.settled(path) for path in self._files)
        self._may_record = tuple(state.unsettled_ns <= 0 for state in self._states)
        self._folder = cache_dir / FOLDER

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(state.size for state in self._states)

    def known(self) -> str | None:
        """From records alone; None when one is missing."""
        found = [self._record(state) for state in self._states]
        digests = [digest for digest in found if digest is not None]
        return self._joined(digests) if len(digests) == len(found) else None

    def compute(self, is_stopped: Callable[[], bool] = lambda: False) -> str | None:
        """From records, and by reading the files that have none; None when stopped.

        Raises WeightsChangedError, and OSError when a file can't be read.
        """
        digests = []
        for path, state, may_record in zip(
            self._files, self._states, self._may_record, strict=True
        ):
            digest = self._record(state)
            if digest is None:
                digest = _digest_file(path, is_stopped)
                if digest is None:
                    return None
                self._check_unchanged(path, state)
                if may_record:
                    self._write_record(state, digest)
            else:  # the record is of what was there before the model was loaded
                self._check_unchanged(path, state)
            digests.append(digest)
        return self._joined(digests)

    def _check_unchanged(self, path: Path, state: FileState) -> None:
        if FileState.of(path) != state:
            raise WeightsChangedError(f"{path} changed while the model was loaded from it")

    def _joined(self, digests: list[str]) -> str:
        names = [path.name for path in self._files]
        text = json.dumps(list(zip(names, digests, strict=True)))
        return hashlib.sha256(text.encode()).hexdigest()

    def _record(self, state: FileState) -> str | None:
        path = self._folder / state.record_name
        try:
            text = path.read_text("ascii")
        except (OSError, ValueError):
            return None
        is_digest = len(text) == _HEX_CHARS and all(c in "0123456789abcdef" for c in text)
        return text if is_digest else None

    def _write_record(self, state: FileState, digest: str) -> None:
        """Whole or not at all; a cache folder that can't be written costs time, no more."""
        partial = self._folder / f"{state.record_name}.{os.getpid()}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._make_room()
            partial.write_text(digest, "ascii")
            partial.replace(self._folder / state.record_name)
        except OSError as error:
            logger.warning("the weights' digest can't be kept in %s: %s", self._folder, error)
            with suppress(OSError):
                partial.unlink()

    def _make_room(self) -> None:
        """Delete the oldest records beyond MAX_RECORDS."""
        records = list(self._folder.iterdir())
        if len(records) < MAX_RECORDS:
            return
        with suppress(OSError):
            records.sort(key=lambda path: path.stat().st_mtime)
        for path in records[: len(records) - MAX_RECORDS // 2]:
            with suppress(OSError):
                path.unlink()


def _digest_file(path: Path, is_stopped: Callable[[], bool]) -> str | None:
    """XXH3-128 in hexadecimal; None when stopped. Hashing releases the interpreter's lock."""
    hasher = xxhash.xxh3_128()
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            if is_stopped():
                return None
            hasher.update(view[:count])
    return hasher.hexdigest()
