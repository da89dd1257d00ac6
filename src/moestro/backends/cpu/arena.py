"""Arena: the intermediate memory that all captured graphs share.

A piece is free again once the last tensor over it is gone, views included. Calls are replayed in
the order of their capture, so a piece may be given out anew as soon as it is free.
"""

import math
import weakref
from collections.abc import Callable

import numpy as np
import torch

_ALIGNMENT = 64
_CHUNK_BYTES = 1 << 20


class _FreeList:
    """First fit in one chunk of `size` bytes; neighbours merge. Offsets in bytes."""

    def __init__(self, size: int) -> None:
        self.free = [(0, size)]  # begin, end; ascending

    def take(self, size: int) -> int | None:
        for i, (begin, end) in enumerate(self.free):
            if end - begin >= size:
                self.free[i : i + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        return None

    def give(self, begin: int, size: int) -> None:
        pieces = sorted([*self.free, (begin, begin + size)])
        merged = pieces[:1]
        for begin, end in pieces[1:]:
            if begin == merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        self.free = merged


class Arena:
    """Chunks of memory, grown when a capture needs more; the largest graph comes first."""

    def __init__(self) -> None:
        self._chunks: list[np.ndarray] = []

    @property
    def num_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    def allocator(self) -> Callable[[tuple[int, ...], torch.dtype], torch.Tensor]:
        """A fresh allocator over all of the memory, for one capture.

        Earlier graphs use the same memory: whoever replays one has its result until the next.
        """
        free = [_FreeList(chunk.nbytes) for chunk in self._chunks]

        def new_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            num_bytes = math.prod(shape) * dtype.itemsize
            size = -(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
            index, begin = self._place(free, size)
            # The storage holds this array as long as any tensor over it lives.
            piece = self._chunks[index][begin : begin + size]
            weakref.finalize(piece, free[index].give, begin, size).atexit = False
            return torch.from_numpy(piece)[:num_bytes].view(dtype).view(shape)

        return new_empty

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in this memory."""
        address = tensor.data_ptr()
        return any(
            chunk.ctypes.data <= address < chunk.ctypes.data + chunk.nbytes
            for chunk in self._chunks
        )

    def _place(self, free: list[_FreeList], size: int) -> tuple[int, int]:
        for index, chunk in enumerate(free):
            begin = chunk.take(size)
            if begin is not None:
                return index, begin
        raw = np.empty(max(size, _CHUNK_BYTES) + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        self._chunks.append(raw[start : start + max(size, _CHUNK_BYTES)])
        free.append(_FreeList(self._chunks[-1].nbytes))
        begin = free[-1].take(size)
        assert begin is not None
        return len(free) - 1, begin
