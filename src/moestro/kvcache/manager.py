"""KVCacheManager: the one facade over pages, prefix index and page identity."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from moestro.core.kv_events import KVEvent
from moestro.core.kv_hints import PrefixUse
from moestro.core.page_moves import PageLoad, PageMover
from moestro.core.request import Sequence
from moestro.errors import CapacityError, ConfigError
from moestro.kvcache.allocator import PageAllocator
from moestro.kvcache.identity import PageHasher, root_hash
from moestro.kvcache.prefix_index import PrefixIndex
from moestro.kvcache.tier_policy import TierConfig


@dataclass(frozen=True, slots=True)
class KVCacheStats:
    """queries and hits count prompt tokens of first admissions, and only grow.

    num_used_pages: pages that sequences hold; num_idle_pages: cached ones that nobody holds.
    """

    num_pages: int
    num_used_pages: int
    num_idle_pages: int
    queries_tokens: int
    hits_tokens: int


class KVCacheManager:
    """Gives pages to sequences, finds shared prefixes, keeps what is released for later hits.

    It changes pages, page_hashes, num_published_pages, num_computed_tokens and num_cached_tokens
    of the sequences it is handed, nothing else. A page is published once it is full and computed,
    and from then on is never written again. `namespace` digests everything outside the tokens
    that changes KV values. mover, tiers: what lies below the device, if anything does. clock:
    seconds; only deadlines of fetches and of pins depend on it.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        enable_prefix_caching: bool = True,
        namespace: bytes = b"",
        mover: PageMover | None = None,
        tiers: TierConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if num_pages < 1:
            raise CapacityError(
                f"The KV memory holds {num_pages} pages of {page_size} tokens: give it at least 1."
            )
        if page_size < 1:
            raise ConfigError(f"page_size must be at least 1, got {page_size}.")
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self._namespace = namespace
        self._mover = mover
        self._tiers = tiers or TierConfig()
        self._clock = clock
        self._hasher = PageHasher(page_size)
        self._allocator = PageAllocator(num_pages)
        self._index = PrefixIndex()
        self._queries_tokens = 0
        self._hits_tokens = 0
        self._num_releases = 0
        self._refused = (-1, 0, 0)
        self._refused_short = 0

    @property
    def capacity_tokens(self) -> int:
        """How many positions the whole pool holds."""
        return self.num_pages * self.page_size

    @property
    def num_available_pages(self) -> int:
        """Pages that an allocation can have now: free ones and idle cached ones."""
        return self._allocator.num_free + self._index.num_idle

    def hash_pages(self, seq: Sequence) -> None:
        """Name every full page of `seq` that has no name yet. Costs O(new pages).

        Raises struct.error for a token id outside [0, 2^32).
        """
        if self.enable_prefix_caching:
            hashes = seq.page_hashes
            parent = hashes[-1] if hashes else self._root(seq)
            self._hasher.extend(hashes, parent, seq.token_ids)

    def pages_short(self, seq: Sequence, headroom: int, use_cache: bool = True) -> int:
        """How many pages are missing to admit `seq`; 0 when it fits.

        `headroom` pages must stay available beside its own. A refusal is remembered until some
        sequence releases pages, so asking again costs O(1).
        """
        asked = (seq.seq_id, headroom, self._num_releases)
        if asked == self._refused:
            return self._refused_short
        return self._shortage(seq, self._match(seq, use_cache), headroom)

    def admit(self, seq: Sequence, headroom: int, use_cache: bool = True) -> bool:
        """Give `seq`, which holds nothing, pages for all its known tokens, or say no.

        Pages of its longest published prefix are shared and count as computed; never all of its
        tokens, so that the logits after the last one are computed. use_cache False: share nothing.
        """
        if (seq.seq_id, headroom, self._num_releases) == self._refused:
            return False
        hits = self._match(seq, use_cache)
        if self._shortage(seq, hits, headroom):
            return False
        for page in hits:
            if self._index.is_idle(page):
                self._index.unpark(page)
            self._allocator.retain(page)
        seq.pages = hits + self._take(self._num_pages_for(len(seq.token_ids)) - len(hits))
        seq.num_published_pages = len(hits)
        seq.num_computed_tokens = len(hits) * self.page_size
        if seq.num_preemptions == 0:
            self._count_first_admission(seq, use_cache)
        return True

    def grow(self, seq: Sequence, num_tokens: int) -> tuple[int, ...] | None:
        """Make room for positions [0, num_tokens): the pages added, or None if there are none."""
        missing = self._num_pages_for(num_tokens) - len(seq.pages)
        if missing <= 0:
            return ()
        if missing > self.num_available_pages:
            return None
        pages = self._take(missing)
        seq.pages += pages
        return tuple(pages)

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """The first `num_tokens` tokens are computed and final: publish their full pages."""
        done = num_tokens // self.page_size
        if done <= seq.num_published_pages or not self.enable_prefix_caching:
            return
        if done > len(seq.page_hashes):
            self.hash_pages(seq)
        for i in range(seq.num_published_pages, done):
            self._index.insert(seq.page_hashes[i], seq.pages[i])
        seq.num_published_pages = done

    def release(self, seq: Sequence) -> None:
        """Take back everything `seq` holds; published pages stay for later hits while unused."""
        pages = seq.pages
        if not pages:
            return
        self._num_releases += 1
        for i in range(len(pages) - 1, -1, -1):
            page = pages[i]
            if self._allocator.drop(page):
                continue
            # A page that lost the race to be published takes the place of a winner that has
            # been evicted since: without it the pages after it could never be reached.
            if self._index.holds(page) or (
                i < seq.num_published_pages and self._index.insert(seq.page_hashes[i], page)
            ):
                self._index.park(page)
            else:
                self._allocator.free(page)
        seq.pages = []
        seq.num_published_pages = 0
        seq.num_computed_tokens = 0

    def poll(self) -> list[int]:
        """Take in what finished moves; seq_ids whose wait for lower tiers is over."""
        return []

    def take_loads(self) -> tuple[PageLoad, ...]:
        """What the step being planned must load from host slots, since the last call."""
        return ()

    def end_step(self) -> None:
        """The output of the step that took the loads is there: their slots are free to change."""

    def wait(self, timeout_s: float) -> None:
        """Sleep until a move may have finished, at most so long."""
        if self._mover is not None:
            self._mover.wait(timeout_s)

    def take_events(self) -> list[KVEvent]:
        """What pages came and went since the last call, if TierConfig.records_events."""
        return []

    def stats(self) -> KVCacheStats:
        """Usage now and counters so far."""
        return KVCacheStats(
            num_pages=self.num_pages,
            num_used_pages=self.num_pages - self.num_available_pages,
            num_idle_pages=self._index.num_idle,
            queries_tokens=self._queries_tokens,
            hits_tokens=self._hits_tokens,
        )

    def check(self, holders: list[Sequence]) -> None:
        """Raise AssertionError unless `holders` hold exactly the held pages. Costs O(pages)."""
        self._allocator.check()
        self._index.check()
        counts = [0] * self.num_pages
        for seq in holders:
            for page in seq.pages:
                counts[page] += 1
        for page, count in enumerate(counts):
            assert self._allocator.count(page) == count, f"page {page} is counted wrongly"
            assert not (count and self._index.is_idle(page)), f"page {page} is held and idle"
        used = sum(1 for count in counts if count)
        assert used + self.num_available_pages == self.num_pages, "a page is lost"

    def _root(self, seq: Sequence) -> bytes:
        return root_hash(self._namespace, seq.request.cache_salt)

    def _num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _match(self, seq: Sequence, use_cache: bool) -> list[int]:
        if not (use_cache and self.enable_prefix_caching):
            return []
        self.hash_pages(seq)
        return self._index.match(seq.page_hashes, (len(seq.token_ids) - 1) // self.page_size)

    def _shortage(self, seq: Sequence, hits: list[int], headroom: int) -> int:
        wanted = self._num_pages_for(len(seq.token_ids)) - len(hits)
        idle_hits = sum(1 for page in hits if self._index.is_idle(page))
        short = max(0, wanted + headroom - (self.num_available_pages - idle_hits))
        if short:
            self._refused = (seq.seq_id, headroom, self._num_releases)
            self._refused_short = short
        return short

    def _take(self, num_pages: int) -> list[int]:
        while self._allocator.num_free < num_pages:
            self._allocator.free(self._index.evict())
        return self._allocator.allocate(num_pages)

    def _count_first_admission(self, seq: Sequence, use_cache: bool) -> None:
        seq.num_cached_tokens = seq.num_computed_tokens
        seq.prefix = PrefixUse(device_tokens=seq.num_cached_tokens)
        if use_cache and self.enable_prefix_caching:
            self._queries_tokens += len(seq.token_ids)
            self._hits_tokens += seq.num_cached_tokens
