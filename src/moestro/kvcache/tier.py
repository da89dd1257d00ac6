"""Tier: the pages of one kind of memory, and taking them from runs that can spare them."""

from moestro.kvcache.allocator import PageAllocator
from moestro.kvcache.event_log import EventLog
from moestro.kvcache.eviction import EvictionOrder
from moestro.kvcache.prefix_index import PrefixIndex
from moestro.kvcache.run import Run


class Tier:
    """Device pages or host slots: a free list, and the order in which runs give theirs up.

    The order is the index's; runs are in it while nobody holds their pages here.
    """

    def __init__(self, num_pages: int, index: PrefixIndex, medium: str, log: EventLog) -> None:
        self.allocator = PageAllocator(num_pages)
        self.order: EvictionOrder = getattr(index, medium)
        self.num_evicted_pages = 0
        self._index = index
        self._medium = medium
        self._field, self._other = ("pages", "slots") if medium == "device" else ("slots", "pages")
        self._log = log

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages

    @property
    def num_available(self) -> int:
        """Pages that can be taken now: free ones, and those of runs that nobody holds."""
        return self.allocator.num_free + self.order.num_pages

    def take(self, num_pages: int, prefer_saved: bool = False) -> list[int]:
        """Free pages, after evicting what is needed. The caller checks num_available first.

        prefer_saved: of runs that are elsewhere too, as long as there are any.
        """
        while self.allocator.num_free < num_pages:
            run = self._victim(prefer_saved)
            assert run is not None, "more pages taken than are available"
            self.evict(run, num_pages - self.allocator.num_free)
        return self.allocator.allocate(num_pages)

    def evict(self, run: Run, num_pages: int) -> None:
        """Free the last `num_pages` of a run in the order, or all of it if it has no more."""
        if num_pages < run.num_pages:
            if not (run.children or run.num_users or run.claims or getattr(run, self._other)):
                self._log.removed(run, self._medium, run.num_pages - num_pages)
                self.num_evicted_pages += num_pages
                self.allocator.free(getattr(run, self._field)[-num_pages:])
                self._index.truncate(run, num_pages)
                return
            self._index.split(run, run.num_pages - num_pages, self.order)
        self.num_evicted_pages += run.num_pages
        self.drop(run)

    def drop(self, run: Run) -> None:
        """Free all pages of a run in the order; it is forgotten if it is nowhere else."""
        self._log.removed(run, self._medium)
        self.order.discard(run)
        self.allocator.free(getattr(run, self._field))
        setattr(run, self._field, [])
        self._index.prune(run)
        self._index.join(run)  # what was evicted piece by piece is one run again

    def trim(self, low: float, high: float) -> None:
        """Above the share `high` of its pages, evict down to the share `low`."""
        if self.allocator.num_taken <= high * self.num_pages:
            return
        excess = self.allocator.num_taken - int(low * self.num_pages)
        while excess > 0 and (run := self.order.first()) is not None:
            num_free = self.allocator.num_free
            self.evict(run, excess)
            excess -= self.allocator.num_free - num_free

    def _victim(self, prefer_saved: bool) -> Run | None:
        if prefer_saved:
            for run in self.order:
                if (run.slots or run.stored) and not self.order.is_pinned(run):
                    return run
        return self.order.first()
