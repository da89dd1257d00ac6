"""Memory that is read into, lent again once nobody looks at it any more.

Fresh memory costs the system more than the copying: it hands it out page by page, each cleared.
"""

import sys

import numpy as np

MAX_BLOCKS = 4
MAX_KEPT_BYTES = 2**26
_OURS = 3  # references to a block that nobody else has: the list's, the loop's, getrefcount's own


class Blocks:
    """For one thread; what it lent may be dropped in any."""

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []

    def lend(self, num_bytes: int) -> memoryview:
        """So many bytes, which no other view shares while one of these, or of its parts, lives."""
        for block in self._kept:
            is_fit = num_bytes <= block.nbytes <= max(4 * num_bytes, 2**20)
            if is_fit and sys.getrefcount(block) == _OURS:
                return block.data[:num_bytes]
        block = np.empty(num_bytes, np.uint8)
        if num_bytes <= MAX_KEPT_BYTES // MAX_BLOCKS:
            self._kept = [block, *self._kept[: MAX_BLOCKS - 1]]
        return block.data
