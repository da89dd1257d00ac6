"""Telling the system which parts of a mapped file are read next.

Left to itself it reads a mapping in steps of 128 KiB, each waited for; told of all pages of a call
first, it has the disk at work while the first is copied (docs/log.md has numbers).
"""

import ctypes
import mmap
from collections.abc import Iterable

import numpy as np

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def will_need(views: Iterable[memoryview]) -> None:
    """Start reading what these views of a mapping show; advice, so it can't fail."""
    for view in views:
        if view.nbytes:
            address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
            start = address - address % mmap.PAGESIZE
            _madvise(start, address - start + view.nbytes, mmap.MADV_WILLNEED)
