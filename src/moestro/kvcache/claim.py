"""Claim: something that needs runs to stay where they are for a while."""

from moestro.kvcache.prefix_index import PrefixIndex
from moestro.kvcache.run import Run


class Claim:
    """A transfer under way, a step that loads, a sequence that waits: it pins what it names.

    runs are in prefix order; when one is divided, its upper part joins them. on_device, on_host:
    in which tiers nothing of them may be evicted. sinks: they are on their way down. While
    claimed no run is forgotten or joined.
    """

    __slots__ = ("_index", "on_device", "on_host", "runs", "sinks")

    def __init__(
        self, index: PrefixIndex, on_device: bool, on_host: bool, sinks: bool = False
    ) -> None:
        self._index = index
        self.sinks = sinks
        self.on_device = on_device
        self.on_host = on_host
        self.runs: list[Run] = []

    @property
    def is_pin(self) -> bool:
        """Whether a client asked for it: it pins no pages, it asks to be evicted last."""
        return not (self.on_device or self.on_host or self.sinks)

    def add(self, run: Run) -> None:
        """Claim one more run; once is enough."""
        self.runs.append(run)
        run.claims.append(self)
        if self.on_device:
            self._index.device.pin(run)
        if self.on_host:
            self._index.host.pin(run)

    def divide(self, run: Run, upper: Run) -> None:
        """`upper` has been split off the claimed `run`, with its claims and pins."""
        self.runs.insert(self.runs.index(run), upper)

    def end(self) -> list[Run]:
        """Let go of all runs and return them; the caller forgets what is nowhere now."""
        runs, self.runs = self.runs, []
        for run in runs:
            run.claims.remove(self)
            if self.on_device:
                self._index.device.unpin(run)
            if self.on_host:
                self._index.host.unpin(run)
        return runs
