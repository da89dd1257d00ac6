"""DeviceTier: who holds the device pages of the runs."""

from moestro.kvcache.event_log import EventLog
from moestro.kvcache.identity import TOKEN_BYTES
from moestro.kvcache.prefix_index import PrefixIndex
from moestro.kvcache.run import Run
from moestro.kvcache.tier import Tier


class DeviceTier(Tier):
    """A sequence's pages are its own until published, then a run's; it holds the runs it shares.

    A sequence is known here by its tail: the run at whose end its published prefix ends. All runs
    from there to the root are in its use. It holds those of them whose pages are its own; of the
    others it has copies, computed at the same time as somebody else who published first.
    """

    def __init__(self, num_pages: int, page_size: int, index: PrefixIndex, log: EventLog) -> None:
        super().__init__(num_pages, index, "device", log)
        self._page_bytes = page_size * TOKEN_BYTES

    def hold(self, path: list[tuple[Run, int]], root: Run, owner: str) -> tuple[Run, list[Run]]:
        """A sequence shares this path of runs; its tail, and the runs that have no pages yet.

        Those hold the place of the first pages of the sequence and must be given pages before
        anything else happens. A run of which only the first pages match is divided behind them.
        """
        tail, missing = root, []
        root.num_users += 1
        for found, num_equal in path:
            tail = found
            if num_equal < found.num_pages:
                tail = self._index.split(found, num_equal)
            tail.num_users += 1
            tail.num_hits += 1
            if tail.owner != owner:
                tail.owner = None
            if not tail.pages:
                missing.append(tail)
                continue
            if tail.num_holders == 0:
                self.order.discard(tail)
            tail.num_holders += 1
        return tail, missing

    def fill(self, run: Run, pages: list[int]) -> None:
        """`run` has no pages: these of the one sequence that holds it from now on become its."""
        run.pages = pages
        run.num_holders = 1
        self._log.stored(run, "device")

    def publish(self, tail: Run, packed: bytes, pages: list[int], owner: str) -> Run:
        """`pages`, with these tokens, follow the sequence's `tail`; its tail from now on."""
        done = 0
        for run, num_equal in self._index.match_below(tail, packed, len(pages)):
            tail = run
            if num_equal < run.num_pages:
                tail = self._index.split(run, num_equal)
            tail.num_users += 1
            if tail.owner != owner:
                tail.owner = None
            if not tail.pages:
                self.fill(tail, pages[done : done + num_equal])
            done += num_equal
        if done:
            packed, pages = packed[done * self._page_bytes :], pages[done:]
        return self._append(tail, packed, pages, owner) if pages else tail

    def release(self, tail: Run, pages: list[int], num_published: int) -> None:
        """A sequence with this tail gives back its pages, the first num_published published.

        A copy that lost the race to be published takes the place of a winner that has been
        evicted since: without it the pages after it could never be reached.
        """
        order, index = self.order, self._index
        unused = pages[num_published:]
        run, below, end = tail, None, num_published
        while True:
            run.num_users -= 1
            parent = run.parent
            if parent is None:
                break
            begin = end - run.num_pages
            if run.pages and run.pages[0] != pages[begin]:
                unused = pages[begin:end] + unused
            else:
                if not run.pages:
                    self.fill(run, pages[begin:end])
                run.num_holders -= 1
                if run.num_holders == 0:
                    order.add(run)
            index.host.touch(run)
            if below is not None:
                index.join(run)
            run, below, end = parent, run, begin
        index.prune(run)
        self.allocator.free(unused)

    def _append(self, tail: Run, packed: bytes, pages: list[int], owner: str) -> Run:
        """New tokens at the end of a sequence's prefix: in its last run if that is its alone."""
        is_alone = tail.num_users == tail.num_holders == 1 and not tail.children
        is_alone = is_alone and tail.owner == owner
        if is_alone and not (tail.is_root or tail.claims or tail.slots or tail.stored):
            num_before = tail.num_pages
            self._index.lengthen(tail, packed)
            tail.pages += pages
            self._log.stored(tail, "device", num_before)
            return tail
        run = self._index.add(tail, packed)
        run.num_users = 1
        run.owner = owner
        self.fill(run, list(pages))
        return run
