"""VirtualClock: time that passes only when the simulation says so."""


class VirtualClock:
    """Callable like time.monotonic. Starts at 0 and never goes back."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self.now_s += max(0.0, seconds)

    def advance_to(self, at_s: float) -> None:
        """Let time pass until then; nothing if that is over."""
        self.now_s = max(self.now_s, at_s)
