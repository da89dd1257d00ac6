"""DeviceTier: who holds the device pages of the runs, and what is evicted for new ones."""

from moestro.kvcache.allocator import PageAllocator
from moestro.kvcache.identity import TOKEN_BYTES
from moestro.kvcache.prefix_index import PrefixIndex
from moestro.kvcache.run import Run


class DeviceTier:
    """A sequence's pages are its own until published, then a run's; it holds the runs it shares.

    A sequence is known here by its tail: the run at whose end its published prefix ends. All runs
    from there to the root are in its use. It holds those of them whose pages are its own; of the
    others it has copies, computed at the same time as somebody else who published first.
    """

    def __init__(self, num_pages: int, page_size: int, index: PrefixIndex) -> None:
        self.allocator = PageAllocator(num_pages)
        self._index = index
        self._order = index.device
        self._page_bytes = page_size * TOKEN_BYTES
        self.num_evicted_pages = 0

    @property
    def num_available(self) -> int:
        """Pages that can be taken now: free ones, and those of runs that nobody holds."""
        return self.allocator.num_free + self._order.num_pages

    def take(self, num_pages: int) -> list[int]:
        """Free pages, after evicting what is needed. The caller checks num_available first."""
        while self.allocator.num_free < num_pages:
            run = self._order.first()
            assert run is not None, "more pages taken than are available"
            self.evict(run, num_pages - self.allocator.num_free)
        return self.allocator.allocate(num_pages)

    def evict(self, run: Run, num_pages: int) -> None:
        """Free the last `num_pages` of an idle run, or all of it if it has no more."""
        index = self._index
        if num_pages < run.num_pages:
            if not (run.children or run.num_users or run.slots or run.moves):
                self.num_evicted_pages += num_pages
                self.allocator.free(run.pages[-num_pages:])
                index.truncate(run, num_pages)
                return
            index.split(run, run.num_pages - num_pages, self._order)
        self.num_evicted_pages += run.num_pages
        self._order.discard(run)
        self.allocator.free(run.pages)
        run.pages = []
        index.prune(run)

    def hold(self, path: list[tuple[Run, int]], root: Run) -> Run:
        """A sequence shares this path of runs with pages; the tail that it has now.

        A run of which only the first pages match is divided behind them.
        """
        tail = root
        root.num_users += 1
        for found, num_equal in path:
            run = found
            if num_equal < found.num_pages:
                run = self._index.split(found, num_equal)
            if run.num_holders == 0:
                self._order.discard(run)
            run.num_users += 1
            run.num_holders += 1
            run.num_hits += 1
            tail = run
        return tail

    def publish(self, tail: Run, packed: bytes, pages: list[int]) -> Run:
        """`pages`, with these tokens, follow the sequence's `tail`; its tail from now on."""
        done = 0
        for run, num_equal in self._index.match_below(tail, packed, len(pages)):
            tail = run
            if num_equal < run.num_pages:
                tail = self._index.split(run, num_equal)
            tail.num_users += 1
            if not tail.pages:
                tail.pages = pages[done : done + num_equal]
                tail.num_holders = 1
            done += num_equal
        if done:
            packed, pages = packed[done * self._page_bytes :], pages[done:]
        return self._append(tail, packed, pages) if pages else tail

    def release(self, tail: Run, pages: list[int], num_published: int) -> None:
        """A sequence with this tail gives back its pages, the first num_published published.

        A copy that lost the race to be published takes the place of a winner that has been
        evicted since: without it the pages after it could never be reached.
        """
        order, index = self._order, self._index
        unused = pages[num_published:]
        run, below, end = tail, None, num_published
        while True:
            run.num_users -= 1
            parent = run.parent
            if parent is None:
                break
            begin = end - run.num_pages
            if not run.pages:
                run.pages = pages[begin:end]
                order.add(run)
            elif run.pages[0] != pages[begin]:
                unused = pages[begin:end] + unused
            else:
                run.num_holders -= 1
                if run.num_holders == 0:
                    order.add(run)
            index.host.touch(run)
            if below is not None:
                index.join(run)
            run, below, end = parent, run, begin
        index.prune(run)
        self.allocator.free(unused)

    def owned(self) -> list[int]:
        """Every page that is a run's. For checks."""
        return [page for run in self._index.runs() for page in run.pages]

    def _append(self, tail: Run, packed: bytes, pages: list[int]) -> Run:
        """New tokens at the end of a sequence's prefix: in its last run if that is its alone."""
        is_alone = tail.num_users == tail.num_holders == 1 and not tail.children
        if is_alone and not (tail.is_root or tail.moves or tail.slots or tail.stored):
            self._index.lengthen(tail, packed)
            tail.pages += pages
            return tail
        run = self._index.add(tail, packed)
        run.pages = list(pages)
        run.num_users = run.num_holders = 1
        return run
