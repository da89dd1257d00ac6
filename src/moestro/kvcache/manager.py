"""KVCacheManager: the one facade over pages, prefix index and tiers."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from moestro.core.kv_events import KVEvent
from moestro.core.kv_hints import PrefixUse
from moestro.core.page_moves import PageLoad, PageMover
from moestro.core.request import Sequence
from moestro.errors import CapacityError, ConfigError
from moestro.kvcache.device_tier import DeviceTier
from moestro.kvcache.identity import TOKEN_BYTES, pack_tokens
from moestro.kvcache.prefix_index import PrefixIndex
from moestro.kvcache.run import Run
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

    It changes pages, packed_tokens, num_published_pages, num_computed_tokens and
    num_cached_tokens of the sequences it is handed, nothing else. A page is published once it is
    full and computed, and from then on is never written again. `namespace` digests everything
    outside the tokens that changes KV values. mover, tiers: what lies below the device, if
    anything does. clock: seconds; only deadlines of fetches and of pins depend on it.

    Work is counted in runs of pages: what is done for each page is done by slices.
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
        self._mover = mover
        self._tiers = tiers or TierConfig()
        self._clock = clock
        self._index = PrefixIndex(page_size, namespace, self._tiers.default_priority)
        self._device = DeviceTier(num_pages, page_size, self._index)
        self._tails: dict[int, Run] = {}  # by seq_id: the run that its published prefix ends with
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
        return self._device.num_available

    def pack(self, seq: Sequence) -> None:
        """Note the tokens of `seq` in the form that prefixes are compared in.

        Raises OverflowError for a token id outside [0, 2^32).
        """
        if self.enable_prefix_caching and len(seq.packed_tokens) != TOKEN_BYTES * len(
            seq.token_ids
        ):
            seq.packed_tokens = pack_tokens(seq.token_ids)

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
        path = self._match(seq, use_cache)
        if self._shortage(seq, path, headroom):
            return False
        pages: list[int] = []
        for run, num_equal in path:
            pages += run.pages[:num_equal]
        seq.num_published_pages = len(pages)
        seq.num_computed_tokens = len(pages) * self.page_size
        self._tails[seq.seq_id] = self._device.hold(path, self._index.root(_salt(seq)))
        seq.pages = pages + self._device.take(self._num_pages_for(len(seq.token_ids)) - len(pages))
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
        pages = self._device.take(missing)
        seq.pages += pages
        return tuple(pages)

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """The first `num_tokens` tokens are computed and final: publish their full pages."""
        done, begin = num_tokens // self.page_size, seq.num_published_pages
        if done <= begin or not self.enable_prefix_caching:
            return
        packed = self._packed(seq, begin, done)
        tail = self._tails[seq.seq_id]
        self._tails[seq.seq_id] = self._device.publish(tail, packed, seq.pages[begin:done])
        seq.num_published_pages = done

    def release(self, seq: Sequence) -> None:
        """Take back everything `seq` holds; published pages stay for later hits while unused."""
        if not seq.pages:
            return
        self._num_releases += 1
        self._device.release(self._tails.pop(seq.seq_id), seq.pages, seq.num_published_pages)
        seq.pages = []
        seq.packed_tokens = b""
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
            num_idle_pages=self._index.device.num_pages,
            queries_tokens=self._queries_tokens,
            hits_tokens=self._hits_tokens,
        )

    def check(self, holders: list[Sequence]) -> None:
        """Raise AssertionError unless every page is free, a run's or of one of `holders`, and
        their runs are held as often as they say. Costs O(pages)."""
        self._index.check()
        users: Counter[Run] = Counter()
        held: Counter[Run] = Counter()
        private: list[int] = []
        for seq in holders:
            if seq.pages:
                private += seq.pages[seq.num_published_pages :]
                private += self._check_path(seq, users, held)
        self._device.allocator.check(self._device.owned() + private)
        for run in self._index.runs():
            assert run.num_users == users[run], f"{run}: used by {users[run]} sequences"
            assert run.num_holders == held[run], f"{run}: held by {held[run]} sequences"

    def _check_path(self, seq: Sequence, users: Counter[Run], held: Counter[Run]) -> list[int]:
        """Count the runs of `seq`; its own copies of what others published."""
        copies: list[int] = []
        run, end = self._tails[seq.seq_id], seq.num_published_pages
        while run.parent is not None:
            users[run] += 1
            mine = seq.pages[end - run.num_pages : end]
            if run.pages and run.pages[0] == mine[0]:
                assert run.pages == mine, f"{run} is held in part"
                held[run] += 1
            else:
                copies += mine
            run, end = run.parent, end - run.num_pages
        assert end == 0, f"the runs of sequence {seq.seq_id} don't cover what it published"
        return copies

    def _packed(self, seq: Sequence, begin: int, end: int) -> bytes:
        """The tokens of pages [begin, end) of `seq`; those of its prompt are packed already."""
        size = self.page_size * TOKEN_BYTES
        if end * size <= len(seq.packed_tokens):
            return seq.packed_tokens[begin * size : end * size]
        return pack_tokens(seq.token_ids[begin * self.page_size : end * self.page_size])

    def _num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _match(self, seq: Sequence, use_cache: bool) -> list[tuple[Run, int]]:
        """The runs with pages that `seq` begins with, and how many pages of each are its own."""
        if not (use_cache and self.enable_prefix_caching):
            return []
        self.pack(seq)
        limit = (len(seq.token_ids) - 1) // self.page_size
        path = self._index.match(_salt(seq), seq.packed_tokens, limit)
        return list(takewhile(lambda step: step[0].pages, path))

    def _shortage(self, seq: Sequence, path: list[tuple[Run, int]], headroom: int) -> int:
        wanted = self._num_pages_for(len(seq.token_ids))
        num_idle = 0
        for run, num_equal in path:
            wanted -= num_equal
            if self._index.device.is_evictable(run):
                num_idle += num_equal
        short = max(0, wanted + headroom - (self.num_available_pages - num_idle))
        if short:
            self._refused = (seq.seq_id, headroom, self._num_releases)
            self._refused_short = short
        return short

    def _count_first_admission(self, seq: Sequence, use_cache: bool) -> None:
        seq.num_cached_tokens = seq.num_computed_tokens
        seq.prefix = PrefixUse(device_tokens=seq.num_cached_tokens)
        if use_cache and self.enable_prefix_caching:
            self._queries_tokens += len(seq.token_ids)
            self._hits_tokens += seq.num_cached_tokens


def _salt(seq: Sequence) -> str:
    return seq.request.cache_salt
