"""ByteBudget: a token bucket over bytes."""

from collections.abc import Callable

BURST_S = 0.01
"""What was not used is kept for so long, no longer."""


class ByteBudget:
    """Lets bytes_per_s through on average; 0 is no limit. Not thread-safe. clock: seconds."""

    def __init__(self, bytes_per_s: int, clock: Callable[[], float]) -> None:
        self._rate = bytes_per_s
        self._clock = clock
        self._free_at = clock()

    def take(self, num_bytes: int) -> float:
        """Spend some; how many seconds to wait before moving them."""
        if not self._rate:
            return 0.0
        now = self._clock()
        start = max(self._free_at, now - BURST_S)
        self._free_at = start + num_bytes / self._rate
        return max(0.0, start - now)
