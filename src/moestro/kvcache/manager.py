"""KVCacheManager: the one facade over pages, prefix index and tiers."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import takewhile

from moestro.core.kv_events import KVEvent
from moestro.core.kv_hints import HintAnswer, HintRefusal, HintRequest, MissReason, PrefixUse
from moestro.core.kv_stats import KVTierStats
from moestro.core.page_moves import PageLoad, PageMover
from moestro.core.request import Sequence
from moestro.errors import CapacityError, ConfigError
from moestro.kvcache.audit import check_accounts
from moestro.kvcache.device_tier import DeviceTier
from moestro.kvcache.event_log import EventLog
from moestro.kvcache.explain import explain_prefix
from moestro.kvcache.fetcher import Wait
from moestro.kvcache.hints import HintDesk
from moestro.kvcache.identity import TOKEN_BYTES, pack_tokens
from moestro.kvcache.lower_tiers import LowerTiers
from moestro.kvcache.prefix_index import PrefixIndex
from moestro.kvcache.run import Run
from moestro.kvcache.stats import collect_stats
from moestro.kvcache.tier_policy import PINNED_PRIORITY, TierConfig


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
        self._index = index = PrefixIndex(page_size, namespace, self._tiers.default_priority)
        self._log = EventLog(index, page_size, self._tiers.records_events)
        self._device = DeviceTier(num_pages, page_size, index, self._log)
        self._below = LowerTiers(self._tiers, index, self._device, mover, self._log, clock)
        self._desk = HintDesk(self._tiers, index, self._device, self._below, clock)
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

        `headroom` pages must stay available beside its own. Pinned pages are available only while
        no sequence runs: so a pin outlives what comes later, and nobody waits for it for ever. A
        refusal is remembered until some sequence releases pages, so asking again costs O(1).
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
        tail, missing = self._device.hold(path, self._index.root(_salt(seq)), _owner(seq))
        for run in missing:
            self._device.fill(run, self._take(run.num_pages))
        self._below.load(missing)
        pages = _pages_to(tail)
        seq.num_published_pages = len(pages)
        seq.num_computed_tokens = len(pages) * self.page_size
        self._tails[seq.seq_id] = tail
        seq.pages = pages + self._take(self._num_pages_for(len(seq.token_ids)) - len(pages))
        self._below.found(tail)
        self._note_admission(seq, use_cache, sum(run.num_pages for run in missing))
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
        done, begin = num_tokens // self.page_size, seq.num_published_pages
        if done <= begin or not self.enable_prefix_caching:
            return
        packed = self._packed(seq, begin, done)
        tail = self._tails[seq.seq_id]
        end = self._tails[seq.seq_id] = self._device.publish(
            tail, packed, seq.pages[begin:done], _owner(seq)
        )
        self._below.published(end, tail)
        seq.num_published_pages = done

    def release(self, seq: Sequence) -> None:
        """Take back everything `seq` holds; published pages stay for later hits while unused."""
        if not seq.pages:
            return
        self._num_releases += 1
        self._device.release(self._tails.pop(seq.seq_id), seq.pages, seq.num_published_pages)
        seq.pages = []
        seq.num_published_pages = 0
        seq.num_computed_tokens = 0

    def prefetch(self, seq: Sequence, use_cache: bool = True) -> bool:
        """Whether `seq`, just arrived, should wait for pages from the store until poll names it."""
        if not (use_cache and self.enable_prefix_caching and self._below.has_store):
            return False
        self.pack(seq)
        limit = (len(seq.token_ids) - 1) // self.page_size
        return self._below.fetcher.begin(seq.seq_id, _salt(seq), seq.packed_tokens, limit)

    def finish(self, seq: Sequence) -> None:
        """`seq`, which holds nothing any more, has ended: it waits no more; its hints are done."""
        self._below.end_wait(seq.seq_id)
        hints = seq.request.kv_hints
        if hints is None:
            return
        if not self.enable_prefix_caching:
            seq.hint_answer = HintAnswer(0, len(seq.token_ids), HintRefusal.CACHING_OFF)
            return
        num_packed = len(seq.packed_tokens) // TOKEN_BYTES
        packed = seq.packed_tokens + pack_tokens(seq.token_ids[num_packed:])
        seq.packed_tokens = b""
        seq.hint_answer = self._desk.finish(_salt(seq), packed, _owner(seq), hints)

    def hint(self, request: HintRequest) -> HintAnswer:
        """See HintedCache."""
        if not self.enable_prefix_caching:
            num_tokens = len(request.token_ids or ())
            return HintAnswer(clipped=num_tokens, refused=HintRefusal.CACHING_OFF)
        self._num_releases += 1  # what it lets go of may admit who waits
        return self._desk.hint(request)

    def explain(
        self, token_ids: Seq[int], cache_salt: str, tell: Callable[[PrefixUse], None]
    ) -> None:
        """See HintedCache."""
        if not self.enable_prefix_caching:
            tell(PrefixUse(miss=MissReason.CACHING_OFF))
            return
        limit = (len(token_ids) - 1) // self.page_size
        packed = pack_tokens(token_ids)

        def told(stored_to: int | None) -> None:
            use = explain_prefix(
                self._index,
                cache_salt,
                packed,
                limit,
                stored_to=stored_to or 0,
                across_tenants=True,
            )
            if stored_to is None and use.miss is not None:
                use = replace(use, miss=MissReason.LOAD_FAILED, first_difference=None)
            tell(use)

        self._below.fetcher.ask(cache_salt, packed, limit, told)

    def tier_stats(self) -> KVTierStats:
        """Gauges and counters of every tier."""
        return collect_stats(self._tiers, self._device, self._below, self._desk, self.page_size)

    def poll(self) -> list[int]:
        """Take in what finished moves, start new ones; seq_ids whose wait is over. Once a step."""
        ready, has_news = self._below.poll()
        self._num_releases += has_news + self._desk.poll()
        for prefetch_id in [seq_id for seq_id in ready if seq_id < 0]:
            self._desk.prefetched(prefetch_id)
            ready.remove(prefetch_id)
        return ready

    def take_loads(self) -> tuple[PageLoad, ...]:
        """What the step being planned must load from host slots; each call opens a step."""
        return self._below.take_loads()

    def end_step(self, load_bytes: int = 0, load_s: float = 0.0) -> None:
        """The output of the oldest open step is there: its slots and pages are free to change."""
        self._num_releases += self._below.end_loads(load_bytes, load_s)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens in so long: for the choice to load or to recompute."""
        self._below.fetcher.prefill_speed.add(num_tokens, seconds, self._clock())

    @property
    def is_moving(self) -> bool:
        """Whether a move under way may give pages back, or end a wait."""
        return self._below.is_busy

    def wait(self, timeout_s: float) -> None:
        """Sleep until a move may have finished, at most so long."""
        if self._mover is not None:
            self._mover.wait(timeout_s)

    def take_events(self) -> list[KVEvent]:
        """What pages came and went since the last call, if TierConfig.records_events."""
        return self._log.take()

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
        """Raise AssertionError unless every page and host slot is free, a run's, a move's or of
        one of `holders`, and all runs are held as often as they say. Costs O(pages)."""
        check_accounts(self._index, self._device, self._below, self._tails, holders)

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
        return list(takewhile(lambda step: step[0].pages or step[0].slots, path))

    def _shortage(self, seq: Sequence, path: list[tuple[Run, int]], headroom: int) -> int:
        wanted = self._num_pages_for(len(seq.token_ids))
        order = self._index.device
        available = self.num_available_pages
        if self._tails:
            available -= order.num_kept_pages
        for run, num_equal in path:
            if not run.pages:
                continue
            wanted -= num_equal
            is_kept = self._tails and run.priority == PINNED_PRIORITY
            if order.is_evictable(run) and not is_kept:
                available -= num_equal
        short = max(0, wanted + headroom - available)
        if short:
            self._refused = (seq.seq_id, headroom, self._num_releases)
            self._refused_short = short
        return short

    def _why_not_all(
        self, seq: Sequence, use_cache: bool, wait: Wait | None
    ) -> tuple[MissReason | None, int | None]:
        """Why an admitted sequence has not found all of its pages, and where they differ."""
        if not self.enable_prefix_caching:
            return MissReason.CACHING_OFF, None
        if not use_cache:
            return MissReason.NOT_ASKED, None
        limit = (len(seq.token_ids) - 1) // self.page_size
        if seq.num_published_pages >= limit:
            return None, None
        if wait is not None and wait.miss is not None:
            return wait.miss, None
        use = explain_prefix(self._index, _salt(seq), seq.packed_tokens, limit)
        return use.miss, use.first_difference

    def _take(self, num_pages: int) -> list[int]:
        return self._device.take(num_pages, self._below.writes_back)

    def _note_admission(self, seq: Sequence, use_cache: bool, num_loaded: int) -> None:
        """Counters and what the sequence tells of its prefix; of its first admission only."""
        wait = self._below.end_wait(seq.seq_id)
        if seq.num_preemptions:
            return
        seq.num_cached_tokens = seq.num_computed_tokens
        num_fetched = min(num_loaded, wait.num_fetched) if wait else 0
        size = self.page_size
        miss, first_difference = self._why_not_all(seq, use_cache, wait)
        seq.prefix = PrefixUse(
            device_tokens=seq.num_cached_tokens - num_loaded * size,
            host_tokens=(num_loaded - num_fetched) * size,
            store_tokens=num_fetched * size,
            lookup_s=wait.lookup_s if wait else 0.0,
            load_store_s=wait.load_s if wait else 0.0,
            miss=miss,
            first_difference=first_difference,
        )
        if use_cache and self.enable_prefix_caching:
            self._queries_tokens += len(seq.token_ids)
            self._hits_tokens += seq.num_cached_tokens
            self._below.count(seq.prefix)


def _pages_to(tail: Run) -> list[int]:
    """The device pages of all runs from the root to `tail`."""
    runs = []
    run: Run | None = tail
    while run is not None:
        runs.append(run)
        run = run.parent
    pages: list[int] = []
    for above in reversed(runs):
        pages += above.pages
    return pages


def _owner(seq: Sequence) -> str:
    """Whose the runs are that `seq` makes: its session's, or its request's alone."""
    hints = seq.request.kv_hints
    if hints is not None and hints.session_id is not None:
        return hints.session_id
    return f"\0request {seq.request.request_id}"


def _salt(seq: Sequence) -> str:
    return seq.request.cache_salt
