"""PrefixIndex: a radix tree of runs, from token ids to where their pages are."""

from collections.abc import Iterator

from moestro.kvcache.eviction import EvictionOrder
from moestro.kvcache.identity import TOKEN_BYTES, page_hashes, root_hash
from moestro.kvcache.run import Run

_MAX_GHOSTS = 256


class PrefixIndex:
    """Finds, divides and joins runs; a tree for every cache_salt.

    A run is divided where prompts diverge and where only a part of it changes its place, and
    joined again with its only child when the two have come to share one fate. What is divided
    keeps its object for the lower part, so that whoever remembers the end of a prefix by its
    last run need not be told. device, host: which runs each of the two tiers gives up first;
    division and joining keep them in step, everything else is their users' business.
    """

    def __init__(self, page_size: int, namespace: bytes = b"", default_priority: int = 50) -> None:
        self.device = EvictionOrder()
        self.host = EvictionOrder()
        self.default_priority = default_priority
        self._namespace = namespace
        self.page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[str, Run] = {}
        self._salts: dict[Run, str] = {}

    def root(self, cache_salt: str) -> Run:
        """Where the prompts of a tenant begin; made when there is none."""
        root = self._roots.get(cache_salt)
        if root is None:
            root = self._roots[cache_salt] = Run(None, b"", 0, self.default_priority)
            self._salts[root] = cache_salt
        return root

    def find_root(self, cache_salt: str) -> Run | None:
        """Where the prompts of a tenant begin, if it has any."""
        return self._roots.get(cache_salt)

    def match(self, cache_salt: str, packed: bytes, limit: int) -> list[tuple[Run, int]]:
        """Runs along the first `limit` pages of `packed` tokens, and how many pages of each match.

        Only the last one can match in part.
        """
        root = self._roots.get(cache_salt)
        return [] if root is None else self.match_below(root, packed, limit)

    def match_below(self, run: Run, packed: bytes, limit: int) -> list[tuple[Run, int]]:
        """As match, for tokens that follow the end of `run`."""
        path: list[tuple[Run, int]] = []
        size, at = self._page_bytes, 0
        while at < limit:
            child = run.children.get(packed[at * size : (at + 1) * size])
            if child is None:
                break
            num_equal = min(self._num_equal(child, packed, at), limit - at)
            path.append((child, num_equal))
            at += num_equal
            if num_equal < child.num_pages:
                break
            run = child
        return path

    def add(self, parent: Run, packed: bytes) -> Run:
        """A new run of these tokens below `parent`, which has no child that begins like it."""
        num_pages = len(packed) // self._page_bytes
        run = Run(parent, packed, num_pages, self.default_priority)
        key = packed[: self._page_bytes]
        parent.children[key] = run
        parent.ghosts.pop(hash(key), None)
        return run

    def lengthen(self, run: Run, packed: bytes) -> None:
        """Append tokens to a run that has no children; the caller appends its pages."""
        num_pages = len(packed) // self._page_bytes
        self.device.grow(run, num_pages)
        self.host.grow(run, num_pages)
        run.tokens += packed
        run.num_pages += num_pages
        run.ghosts.pop(hash(packed[: self._page_bytes]), None)
        if run.hashes:
            run.hashes += page_hashes(run.hashes[-1], packed, self.page_size)

    def split(self, run: Run, num_pages: int, evicting: EvictionOrder | None = None) -> Run:
        """Divide `run` behind its first `num_pages`; the new run above it, which is those.

        evicting: the order whose first it was, and whose first the new run is to be.
        """
        parent, cut = run.parent, num_pages * self._page_bytes
        assert parent is not None
        assert 0 < num_pages < run.num_pages
        upper = Run(parent, run.tokens[:cut], num_pages, run.priority)
        parent.children[bytes(run.tokens[: self._page_bytes])] = upper
        del run.tokens[:cut]
        upper.children[bytes(run.tokens[: self._page_bytes])] = run
        run.parent = upper
        run.num_pages -= num_pages
        for name in ("pages", "slots", "hashes"):
            whole = getattr(run, name)
            setattr(upper, name, whole[:num_pages])
            del whole[:num_pages]
        upper.stored, upper.stored_s, upper.num_hits = run.stored, run.stored_s, run.num_hits
        upper.owner, upper.tried_at = run.owner, run.tried_at
        upper.num_users, upper.num_holders = run.num_users, run.num_holders
        upper.claims = list(run.claims)
        for claim in run.claims:
            claim.divide(run, upper)
        for order in (self.device, self.host):
            order.divide(run, upper, oldest=order is evicting)
        return upper

    def set_priority(self, run: Run, priority: int, oldest: bool = False) -> None:
        """Its rank in both eviction orders from now on: as the newest of that priority, or as
        the oldest; nothing changes for a run that has it and is not to be the oldest."""
        if run.priority == priority and not oldest:
            return
        orders = [order for order in (self.device, self.host) if run in order]
        for order in orders:
            order.discard(run)
        run.priority = priority
        for order in orders:
            order.add(run, oldest)

    def join(self, upper: Run) -> None:
        """Append the only child of `upper` to it if nothing tells the two apart."""
        if len(upper.children) != 1 or upper.is_root:
            return
        (lower,) = upper.children.values()
        if not self._are_alike(upper, lower):
            return
        self.device.discard(lower)
        self.host.discard(lower)
        self.device.grow(upper, lower.num_pages)
        self.host.grow(upper, lower.num_pages)
        upper.num_pages += lower.num_pages
        upper.tokens += lower.tokens
        upper.pages += lower.pages
        upper.slots += lower.slots
        upper.stored_s = min(upper.stored_s, lower.stored_s)
        if upper.hashes and lower.hashes:
            upper.hashes += lower.hashes
        else:
            upper.hashes = []
        upper.children, upper.ghosts = lower.children, lower.ghosts
        lower.pages, lower.slots, lower.children = [], [], {}  # it is nothing any more
        for child in upper.children.values():
            child.parent = upper

    def truncate(self, run: Run, num_pages: int) -> None:
        """Forget the last `num_pages` of a run without children, in nobody's use and unclaimed."""
        assert not run.children
        assert not run.claims
        assert run.num_users == 0
        self.device.grow(run, -num_pages)
        self.host.grow(run, -num_pages)
        run.num_pages -= num_pages
        cut = run.num_pages * self._page_bytes
        _haunt(run, bytes(run.tokens[cut : cut + self._page_bytes]))
        del run.tokens[cut:]
        for whole in (run.pages, run.slots, run.hashes):
            del whole[run.num_pages :]

    def prune(self, run: Run) -> None:
        """Forget `run`, and then its parents, if there is nothing to remember about them."""
        while not (run.children or run.num_users or run.claims or run.pages or run.slots):
            parent = run.parent
            if parent is None:
                salt = self._salts.pop(run, None)
                if salt is not None:
                    del self._roots[salt]
                return
            key = bytes(run.tokens[: self._page_bytes])
            if parent.children.get(key) is not run:
                return  # forgotten before, or joined
            del parent.children[key]
            _haunt(parent, key)
            run = parent

    def name_pages(self, run: Run) -> list[bytes]:
        """The hashes of the pages of `run`, made now where they are missing."""
        unnamed = []
        above: Run | None = run
        while above is not None and not above.hashes and above.parent is not None:
            unnamed.append(above)
            above = above.parent
        for below in reversed(unnamed):
            below.hashes = page_hashes(self.parent_hash(below), below.tokens, self.page_size)
        return run.hashes

    def parent_hash(self, run: Run) -> bytes:
        """The hash that the first page of `run` follows; its parent's pages have their names."""
        parent = run.parent
        assert parent is not None
        return parent.hashes[-1] if parent.hashes else self.root_name(self._salts[parent])

    def salt_of(self, run: Run) -> str:
        """The cache_salt of a run that prompts begin with."""
        assert run.parent is not None
        return self._salts[run.parent]

    def root_name(self, cache_salt: str) -> bytes:
        """What the first page of any prompt of this tenant follows."""
        return root_hash(self._namespace, cache_salt)

    def runs(self) -> Iterator[Run]:
        """Every run, parents first. For checks and reports."""
        todo = list(self._roots.values())
        while todo:
            run = todo.pop()
            todo += run.children.values()
            if not run.is_root:
                yield run

    def roots(self) -> Iterator[tuple[str, Run]]:
        return iter(self._roots.items())

    def check(self) -> None:
        """Raise AssertionError if a run disagrees with itself or its neighbours."""
        for _, root in self.roots():
            assert root.children or root.num_users, "a tenant without pages is remembered"
        for run in self.runs():
            assert run.num_pages > 0, "an empty run"
            assert len(run.tokens) == run.num_pages * self._page_bytes, f"{run}: tokens"
            for whole in (run.pages, run.slots, run.hashes):
                assert len(whole) in (0, run.num_pages), f"{run}: a list is too short"
            assert 0 <= run.num_holders <= run.num_users, f"{run}: counts"
            assert run.num_holders == 0 or run.pages, f"{run}: held, but no pages"
            parent = run.parent
            assert parent is not None
            assert parent.children[bytes(run.tokens[: self._page_bytes])] is run, "a wrong key"
            assert parent.is_root or run.num_users <= parent.num_users, f"{run}: more users below"
            in_order = run in self.device
            assert in_order == bool(run.pages and not run.num_holders), f"{run}: device order"
            assert (run in self.host) == bool(run.slots), f"{run}: host order"
            used = run.children or run.num_users or run.claims or run.pages or run.slots
            assert used, f"{run} should have been forgotten"
        self.device.check()
        self.host.check()

    def _num_equal(self, run: Run, packed: bytes, at: int) -> int:
        """How many pages of `run` equal `packed` from page `at` on; the first one does."""
        size = self._page_bytes
        begin = at * size
        if packed.startswith(run.tokens, begin):
            return run.num_pages
        low, high = 1, min(run.num_pages, len(packed) // size - at)
        while low < high:
            middle = (low + high + 1) // 2
            if packed.startswith(run.tokens[low * size : middle * size], begin + low * size):
                low = middle
            else:
                high = middle - 1
        return low

    def _are_alike(self, upper: Run, lower: Run) -> bool:
        if upper.num_users or lower.num_users or upper.claims or lower.claims:
            return False
        return (
            bool(upper.pages) == bool(lower.pages)
            and bool(upper.slots) == bool(lower.slots)
            and upper.stored == lower.stored
            and upper.priority == lower.priority
            and upper.owner == lower.owner
            and not (self.device.is_pinned(upper) or self.device.is_pinned(lower))
            and not (self.host.is_pinned(upper) or self.host.is_pinned(lower))
        )


def _haunt(run: Run, key: bytes) -> None:
    """Remember that something beginning with the page `key` was below `run`."""
    run.ghosts[hash(key)] = None
    if len(run.ghosts) > _MAX_GHOSTS:
        del run.ghosts[next(iter(run.ghosts))]
