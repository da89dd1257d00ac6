"""EvictionOrder: which run of a tier gives its pages up first."""

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator

from moestro.kvcache.run import Run
from moestro.kvcache.tier_policy import PINNED_PRIORITY


class EvictionOrder:
    """Runs that nobody holds in one tier: lowest priority first, then least recently used.

    A pinned run keeps its place and is passed over; the order does not change because a transfer
    ended late. Callers add the runs of a prefix last one first, so that a prefix outlives what
    follows it.
    """

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[Run, None]] = {}
        self._priorities: list[int] = []
        self._pins: dict[Run, int] = {}
        self.num_pages = 0
        """Pages that could be evicted now."""
        self.num_kept_pages = 0
        """Those of them that a client has asked to keep."""

    def __contains__(self, run: Run) -> bool:
        level = self._levels.get(run.priority)
        return level is not None and run in level

    def __iter__(self) -> Iterator[Run]:
        """All runs, pinned ones too, next to be evicted first."""
        for priority in self._priorities:
            yield from self._levels[priority]

    def add(self, run: Run, oldest: bool = False) -> None:
        """`run` is not held any more; it goes last of its priority, or first (oldest)."""
        level = self._levels.get(run.priority)
        if level is None:
            level = self._levels[run.priority] = OrderedDict()
            insort(self._priorities, run.priority)
        if run in level:
            raise ValueError(f"{run} is in the eviction order already")
        level[run] = None
        if oldest:
            level.move_to_end(run, last=False)
        if run not in self._pins:
            self._count(run, run.num_pages)

    def discard(self, run: Run) -> None:
        """`run` is held again or gone; nothing happens if it was not in the order."""
        level = self._levels.get(run.priority)
        if level is None or run not in level:
            return
        del level[run]
        if run not in self._pins:
            self._count(run, -run.num_pages)
        if not level:
            del self._levels[run.priority]
            self._priorities.remove(run.priority)

    def touch(self, run: Run) -> None:
        """`run` was used: it goes last of its priority if it is in the order."""
        if run in self:
            self._levels[run.priority].move_to_end(run)

    def grow(self, run: Run, num_pages: int) -> None:
        """`run` of the order is to become longer, or shorter (negative), by so many pages."""
        if run in self and run not in self._pins:
            self._count(run, num_pages)

    def divide(self, run: Run, upper: Run, oldest: bool) -> None:
        """`upper` (new) takes over the first pages of `run`, which is shorter by them already."""
        pins = self._pins.get(run)
        if pins:
            self._pins[upper] = pins
        if run not in self:
            return
        if not pins:
            self._count(run, -upper.num_pages)
        self.add(upper, oldest)

    def pin(self, run: Run) -> None:
        """Something uses its pages: not to be evicted until as many unpins."""
        pins = self._pins.get(run, 0)
        self._pins[run] = pins + 1
        if not pins and run in self:
            self._count(run, -run.num_pages)

    def unpin(self, run: Run) -> None:
        """Take one pin back; KeyError if there is none."""
        pins = self._pins[run] - 1
        if pins:
            self._pins[run] = pins
            return
        del self._pins[run]
        if run in self:
            self._count(run, run.num_pages)

    def is_pinned(self, run: Run) -> bool:
        return run in self._pins

    def is_evictable(self, run: Run) -> bool:
        return run in self and run not in self._pins

    def first(self) -> Run | None:
        """The run to evict next."""
        return next((run for run in self if run not in self._pins), None)

    def check(self) -> None:
        """Raise AssertionError if the counter is wrong. Costs O(runs)."""
        total = sum(run.num_pages for run in self if run not in self._pins)
        assert total == self.num_pages, f"{self.num_pages} pages evictable, counted {total}"
        kept = (run for run in self if run.priority == PINNED_PRIORITY)
        total = sum(run.num_pages for run in kept if run not in self._pins)
        assert total == self.num_kept_pages, f"{self.num_kept_pages} pages kept, counted {total}"
        assert min(self._pins.values(), default=1) > 0, "a pin of nothing"

    def _count(self, run: Run, num_pages: int) -> None:
        """So many more pages of `run` can be evicted."""
        self.num_pages += num_pages
        if run.priority == PINNED_PRIORITY:
            self.num_kept_pages += num_pages
