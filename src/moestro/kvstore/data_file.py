"""Reading large values from LMDB's file instead of its map.

Its client library touches every file page of a value that it shows in the map: a fault every few
pages, each with the address space locked, and from a cold file reads that are waited for one by
one (docs/log.md has numbers). So it is noted where a value was written, and read from there.

A page of LMDB 0.9 begins with its number (8 bytes), 2 of padding and its flags (2). A value of a
file page or more has pages of its own, and follows the header of 16 bytes of the first.
"""

import contextlib
import ctypes
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

PAGE_HEADER_BYTES = 16
_PAGE = struct.Struct("<QHH4x")
_OVERFLOW = 0x04
_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class DataFile:
    """The file of an environment, open for reading beside it; the system keeps both the same."""

    def __init__(self, path: Path, page_bytes: int) -> None:
        """Raises OSError."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._page_bytes = page_bytes

    def place_of(self, view: memoryview) -> int:
        """The first file page of a value that its own writing transaction shows; 0 for one that
        shares a page with others. It stays there until it is deleted or the file is compacted."""
        if view.nbytes < self._page_bytes:
            return 0
        at = np.frombuffer(view, np.uint8).__array_interface__["data"][0] - PAGE_HEADER_BYTES
        number, _, flags = _PAGE.unpack(ctypes.string_at(at, PAGE_HEADER_BYTES))
        return int(number) if flags & _OVERFLOW else 0

    def read(self, place: int, out: memoryview) -> bool:
        """Fill `out` with the value at `place`; False when there is none. Raises OSError.

        In one call, which lets the system read ahead in large pieces. The caller holds a snapshot
        that has the value. Where the file ends too early the rest of `out` is left as it was.
        """
        header = bytearray(PAGE_HEADER_BYTES)
        at = place * self._page_bytes
        count = os.preadv(self._fd, [header, out], at)
        number, _, flags = _PAGE.unpack(header)
        if count < PAGE_HEADER_BYTES or number != place or not flags & _OVERFLOW:
            return False
        done = count - PAGE_HEADER_BYTES
        while count and done < out.nbytes:
            count = os.preadv(self._fd, [out[done:]], at + PAGE_HEADER_BYTES + done)
            done += count
        return True

    def identity(self) -> tuple[int, int]:
        """Device and inode."""
        found = os.fstat(self._fd)
        return (found.st_dev, found.st_ino)

    def close(self) -> None:
        os.close(self._fd)


@contextlib.contextmanager
def cache_left_alone(path: Path) -> Iterator[None]:
    """What is read of the file meanwhile and was not in the system's cache leaves it again.

    For a walk that reads a page here and there: a cache with such holes is filled in small pieces,
    and later reads of the file take twice as long, from the disk and from the cache (docs/log.md).
    """
    with path.open("rb") as file:
        before = _cached(file.fileno())
        try:
            yield
        finally:
            after = _cached(file.fileno())
            new = np.zeros(after.size + 2, np.int8)
            new[1:-1] = after
            new[1 : before.size + 1] &= ~before[: after.size]
            edges = np.flatnonzero(np.diff(new)).reshape(-1, 2)
            for begin, end in edges.tolist():
                start, count = begin * mmap.PAGESIZE, (end - begin) * mmap.PAGESIZE
                os.posix_fadvise(file.fileno(), start, count, os.POSIX_FADV_DONTNEED)


def _cached(fd: int) -> np.ndarray:
    """A 1 or 0 for each page of the file: whether the system has it in memory, if it tells."""
    size = os.fstat(fd).st_size
    found = np.zeros(-(-size // mmap.PAGESIZE), np.int8)
    if size:
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
            start = np.frombuffer(mapped, np.uint8)
            _mincore(start.ctypes.data, size, found.ctypes.data)
            del start
    return found & 1
