"""What a plain LRU cache of pages would hit, for every capacity at once: the yardstick.

Independent of kvcache: no eviction is played here. A page is found by an LRU of N pages exactly if
fewer than N other pages were used since (Mattson et al. 1970, stack distances), so one pass over
the requests, in the order in which they were served, answers for all N.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from moestro.simulator.workload import BlockRange, TracedRequest


class OfflineLRU:
    """Counts hits of requests as they begin and end.

    A request is looked up and uses the full pages of its prompt when it begins, and those of
    prompt and output again when it ends (decoding reads them all), the first page last: what a
    prefix begins with outlives what follows. Block ids must be prefix-chained: equal ids mean
    equal prefixes. Costs O(pieces x log requests) a request, a piece being consecutive blocks that
    were used last at the same time.
    """

    def __init__(self, capacities: Sequence[int], page_size: int, block_size: int) -> None:
        if block_size % page_size:
            raise ValueError(f"blocks of {block_size} tokens don't divide into {page_size}")
        self.capacities = tuple(capacities)
        """in pages"""
        self.hits_tokens = [0] * len(self.capacities)
        self.ideal_hits_tokens = 0
        """of a cache that forgets nothing"""
        self.queries_tokens = 0
        self._page_size = page_size
        self._pages_per_block = block_size // page_size
        self._last_use: dict[int, _LastUse] = {}
        self._own: dict[int, tuple[int, int]] = {}  # by request: use and number of pages no block
        self._lengths: list[int] = []  # by use: pages of the request
        self._newest = _Counts()  # by use: those of them that nobody has used since

    def begin(self, scope: int, request: TracedRequest) -> int:
        """Look one request up and let it use its prompt; tokens that the ideal cache finds."""
        last_use = self._last_use.setdefault(scope, _LastUse())
        per_block, limit = self._pages_per_block, (request.input_len - 1) // self._page_size
        found = 0
        hits = [0] * len(self.capacities)
        for num_blocks, use in last_use.pieces(request.blocks):
            if use is None:
                break
            count = min(num_blocks * per_block, limit - found)
            self._add_hits(hits, use, found, count)
            found += count
        self.queries_tokens += request.input_len
        self.ideal_hits_tokens += found * self._page_size
        for at, pages in enumerate(hits):
            self.hits_tokens[at] += pages * self._page_size
        self._use(scope, request, request.input_len)
        return found * self._page_size

    def end(self, scope: int, request: TracedRequest) -> None:
        """Let a request that began use its prompt and output; the last token has no KV."""
        self._use(scope, request, request.input_len + request.output_len - 1)
        del self._own[request.number]

    def _add_hits(self, hits: list[int], use: int, depth: int, count: int) -> None:
        """Pages [depth, depth + count) of the prompt were last used by `use`."""
        begin = self._lengths[use] - self._newest.get(use)  # others have used those before since
        older = self._newest.total_after(use) + depth - begin
        for at, capacity in enumerate(self.capacities):
            hits[at] += min(count, max(0, capacity - older))

    def _use(self, scope: int, request: TracedRequest, num_tokens: int) -> None:
        last_use, now = self._last_use[scope], len(self._lengths)
        for num_blocks, use in last_use.pieces(request.blocks):
            if use is not None:
                self._newest.add(use, -num_blocks * self._pages_per_block)
        before, num_own = self._own.get(request.number, (0, 0))
        if num_own:
            self._newest.add(before, -num_own)
        length = num_tokens // self._page_size
        self._own[request.number] = now, length - request.num_blocks * self._pages_per_block
        self._newest.append(length)
        self._lengths.append(length)
        last_use.set(request.blocks, now)


class HeldLRU:
    """An LRU of one capacity that can't evict what a request uses from its begin to its end.

    Played page by page, with every so many-th page standing for all: that times fewer steps, and
    off by less than so many pages a request. Its hits are those of a cache that serves requests
    while others run; OfflineLRU's are those of one that could take pages from running requests.
    """

    def __init__(self, capacity: int, page_size: int, block_size: int, every: int = 8) -> None:
        if block_size % page_size:
            raise ValueError(f"blocks of {block_size} tokens don't divide into {page_size}")
        self.hits_tokens = 0
        self._capacity = capacity // every
        self._page_size = page_size
        self._pages_per_block = block_size // page_size
        self._every = every
        self._idle: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._held: dict[tuple[int, int], int] = {}

    def begin(self, scope: int, request: TracedRequest) -> None:
        """Look one request up; it holds the pages of its prompt from now on."""
        names = self._names(scope, request, request.input_len)
        for name in self._names(scope, request, request.input_len - 1):
            if name not in self._idle and name not in self._held:
                break
            self.hits_tokens += self._page_size * self._every
        for name in names:
            self._idle.pop(name, None)
            self._held[name] = self._held.get(name, 0) + 1
        self._evict()

    def end(self, scope: int, request: TracedRequest) -> None:
        """Nothing of its prompt and output is held by it any more, and all was used now."""
        num_held = len(self._names(scope, request, request.input_len))
        names = self._names(scope, request, request.input_len + request.output_len - 1)
        for at in range(len(names) - 1, -1, -1):
            name = names[at]
            if at < num_held:
                self._held[name] -= 1
                if self._held[name]:
                    continue
                del self._held[name]
            self._idle[name] = None
        self._evict()

    def _names(self, scope: int, request: TracedRequest, num_tokens: int) -> list[tuple[int, int]]:
        """Of every so many-th full page of so many tokens."""
        per_block, full = self._pages_per_block, num_tokens // self._page_size
        pages = [
            (scope, block * per_block + page)
            for first, last in request.blocks
            for block in range(first, last + 1)
            for page in range(per_block)
        ]
        pages += [(-1 - request.number, page) for page in range(full - len(pages))]
        return pages[self._every - 1 : full : self._every]

    def _evict(self) -> None:
        while self._idle and len(self._idle) + len(self._held) > self._capacity:
            self._idle.popitem(last=False)


class _LastUse:
    """Block id -> the last use, as consecutive ids of equal value."""

    def __init__(self) -> None:
        self._begins: list[int] = [0]
        self._uses: list[int | None] = [None]

    def pieces(self, blocks: tuple[BlockRange, ...]) -> Iterator[tuple[int, int | None]]:
        """(number of blocks, use) in the order of the prompt."""
        begins, uses = self._begins, self._uses
        for first, last in blocks:
            at = bisect_right(begins, first) - 1
            while first <= last:
                end = begins[at + 1] if at + 1 < len(begins) else last + 1
                end = min(end, last + 1)
                yield end - first, uses[at]
                first, at = end, at + 1

    def set(self, blocks: tuple[BlockRange, ...], use: int) -> None:
        """All these blocks were used now."""
        for first, last in blocks:
            begin = self._cut(first)
            end = self._cut(last + 1)
            self._begins[begin:end] = [first]
            self._uses[begin:end] = [use]

    def _cut(self, block: int) -> int:
        """Let a piece begin at `block`; its index."""
        at = bisect_right(self._begins, block) - 1
        if self._begins[at] == block:
            return at
        self._begins.insert(at + 1, block)
        self._uses.insert(at + 1, self._uses[at])
        return at + 1


class _Counts:
    """A list of counts with fast sums over its end (a Fenwick tree that grows)."""

    def __init__(self) -> None:
        self._values: list[int] = []
        self._sums: list[int] = [0]
        self._total = 0

    def get(self, at: int) -> int:
        return self._values[at]

    def append(self, value: int) -> None:
        """One more count at the end."""
        self._values.append(value)
        self._total += value
        end = len(self._values)
        begin = end - (end & -end)
        self._sums.append(self._sum_before(end - 1) - self._sum_before(begin) + value)

    def add(self, at: int, change: int) -> None:
        """Change one count."""
        self._values[at] += change
        self._total += change
        node = at + 1
        while node < len(self._sums):
            self._sums[node] += change
            node += node & -node

    def total_after(self, at: int) -> int:
        """The sum of the counts behind `at`."""
        return self._total - self._sum_before(at + 1)

    def _sum_before(self, end: int) -> int:
        total = 0
        while end:
            total += self._sums[end]
            end -= end & -end
        return total
