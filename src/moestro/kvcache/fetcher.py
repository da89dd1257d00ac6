"""Fetcher: brings what the store has of a waiting sequence's prompt to the host."""

from collections.abc import Callable

from moestro.core.kv_hints import MissReason
from moestro.core.page_moves import MoveFailure, MoveKind, MoveResult
from moestro.kvcache.claim import Claim
from moestro.kvcache.event_log import EventLog
from moestro.kvcache.identity import TOKEN_BYTES, page_hashes
from moestro.kvcache.prefix_index import PrefixIndex
from moestro.kvcache.run import Run
from moestro.kvcache.tier import Tier
from moestro.kvcache.tier_policy import (
    Speed,
    TierConfig,
    pages_per_move,
    pages_to_probe,
    should_load,
)
from moestro.kvcache.transfers import Flight, Transfers

_MAX_CHUNKS = 2
"""Fetches of one sequence under way: one is read while the next one waits for its turn."""
_SPEED_AGE_S = 10.0


class Wait:
    """One sequence whose pages are looked up and fetched; key: its seq_id.

    The pages from first_page to end are those to fetch; all before next_page are asked for, all
    before done_page are in the tree. claim: the runs it builds on and what has come, pinned in
    the host tier until the sequence is admitted.
    """

    def __init__(self, key: int, salt: str, packed: bytes, first_page: int, claim: Claim) -> None:
        self.key = key
        self.salt = salt
        self.packed = packed
        self.first_page = self.next_page = self.done_page = self.end = first_page
        self.claim = claim
        self.hashes: list[bytes] = []
        self.move_ids: dict[int, int] = {}
        """First page of each move under way, by its id."""
        self.arrived: dict[int, tuple[list[int], int]] = {}
        """By first page: slots and how many of them are filled, until those before are in."""
        self.began_s = self.deadline_s = 0.0
        self.lookup_s = self.load_s = 0.0
        self.miss: MissReason | None = None
        self.is_over = False

    @property
    def num_fetched(self) -> int:
        return self.done_page - self.first_page


class Fetcher:
    """A sequence waits beside the queue until its pages are there, reading them does not pay any
    more, something fails, or its time is up; then it goes on with what has come."""

    def __init__(
        self,
        config: TierConfig,
        index: PrefixIndex,
        host: Tier,
        transfers: Transfers,
        log: EventLog,
        page_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.store_speed = Speed(_SPEED_AGE_S)
        self.prefill_speed = Speed()
        self.num_recomputed_pages = 0
        self.num_looked_up_pages = 0
        self.num_fetched_pages = 0
        self.num_fetched_bytes = 0
        self.fetch_s = 0.0
        self._config = config
        self._index = index
        self._host = host
        self._transfers = transfers
        self._log = log
        self._page_bytes = page_bytes
        self._page_size = index.page_size
        self._clock = clock
        self._chunk_pages = pages_per_move(page_bytes, config.move_chunk_bytes)
        self._waits: dict[int, Wait] = {}
        self._leaders: dict[bytes, int] = {}  # by first page asked for: who fetches it
        self._over: list[int] = []

    def begin(self, key: int, salt: str, packed: bytes, limit: int) -> bool:
        """Look for the pages of `packed` up to `limit` that no run has; whether to wait for it.

        Where the store can't be asked, take gives a wait that says so.
        """
        path, first_page = self._resident_path(salt, packed, limit)
        if first_page >= limit or not self._host.num_pages or not self._transfers.has_store:
            return False
        claim = Claim(self._index, on_device=False, on_host=True)
        for run in path:
            claim.add(run)
        for run in reversed(path):  # as if used now: else it may be gone when the rest has come
            self._index.device.touch(run)
            self._index.host.touch(run)
        wait = Wait(key, salt, packed, first_page, claim)
        wait.hashes = self._name_rest(salt, path, packed, first_page, limit)
        wait.began_s = self._clock()
        compute_s = self.prefill_speed.seconds_for((limit - first_page) * self._page_size)
        wait.deadline_s = wait.began_s + self._config.fetch_timeout_s + (compute_s or 0.0)
        leader = self._leaders.get(wait.hashes[0])
        if leader is None and not self._look_up(wait):
            self.end_claim(wait)
            wait.is_over, wait.miss = True, MissReason.LOAD_FAILED
        self._waits[key] = wait
        return not wait.is_over

    def ask(self, salt: str, packed: bytes, limit: int, told: Callable[[int | None], None]) -> None:
        """Ask the store what it has of the first `limit` pages behind those that runs have, and
        tell the page where that ends; None when it gives no answer. Fetches nothing."""
        path, first_page = self._resident_path(salt, packed, limit)
        if first_page >= limit or not self._host.num_pages or not self._transfers.has_store:
            told(0)
            return

        def on_found(_: Flight, result: MoveResult) -> None:
            has_failed = result.failure not in (None, MoveFailure.MISSING)
            told(None if has_failed else first_page + result.num_done)

        keys = tuple(self._name_rest(salt, path, packed, first_page, limit))
        if self._transfers.submit(MoveKind.LOOKUP, [], on_found, keys=keys, urgent=True) is None:
            told(None)

    def poll(self) -> list[int]:
        """Keys whose wait is over since the last call."""
        now_s = self._clock()
        for wait in list(self._waits.values()):
            if not wait.is_over and now_s >= wait.deadline_s:
                wait.miss = MissReason.LOAD_FAILED
                self._finish(wait)
        over, self._over = self._over, []
        return over

    def take(self, key: int) -> Wait | None:
        """The sequence goes on or ends: its wait, whose claim is the caller's to end."""
        wait = self._waits.pop(key, None)
        if wait is not None and not wait.is_over:
            self._finish(wait)
            self._over.remove(key)
        return wait

    def claimed(self) -> list[Wait]:
        """For checks."""
        return list(self._waits.values())

    def _resident_path(self, salt: str, packed: bytes, limit: int) -> tuple[list[Run], int]:
        path, num_pages = [], 0
        for run, num_equal in self._index.match(salt, packed, limit):
            if not (run.pages or run.slots):
                break
            path.append(run)
            num_pages += num_equal
            if num_equal < run.num_pages:
                break
        return path, num_pages

    def _name_rest(
        self, salt: str, path: list[Run], packed: bytes, first_page: int, limit: int
    ) -> list[bytes]:
        """The hashes of pages from first_page to `limit`, which follow what `path` has."""
        parent, num_before = self._index.root_name(salt), 0
        for run in path:
            names = self._index.name_pages(run)
            parent = names[min(run.num_pages, first_page - num_before) - 1]
            num_before += run.num_pages
        size = TOKEN_BYTES * self._page_size
        return page_hashes(parent, packed[first_page * size : limit * size], self._page_size)

    def _look_up(self, wait: Wait) -> bool:
        move_id = self._transfers.submit(
            MoveKind.LOOKUP,
            [],
            lambda _, result: self._on_found(wait, result),
            keys=tuple(wait.hashes),
            urgent=True,
        )
        if move_id is None:
            return False
        wait.move_ids[move_id] = wait.first_page
        self._leaders[wait.hashes[0]] = wait.key
        self.num_looked_up_pages += len(wait.hashes)
        return True

    def _on_found(self, wait: Wait, result: MoveResult) -> None:
        wait.move_ids.pop(result.move_id, None)
        if wait.is_over:
            return
        wait.lookup_s = self._clock() - wait.began_s
        wait.end = wait.first_page + result.num_done
        if result.failure is MoveFailure.MISSING:
            self._note_gone(wait, wait.end)
        elif result.failure is not None:
            wait.miss = MissReason.LOAD_FAILED
        self._go_on(wait)

    def _go_on(self, wait: Wait) -> None:
        """Ask for the next pages, or end the wait when there are none to come."""
        while wait.next_page < wait.end and len(wait.move_ids) < self._max_chunks():
            if not self._pays(wait) or not self._fetch(wait):
                wait.end = wait.next_page
        if wait.done_page >= wait.end and not wait.move_ids:
            self._finish(wait)

    def _max_chunks(self) -> int:
        """How many fetches of a sequence may be under way: one while it is a measurement."""
        return 1 if self.store_speed.is_stale(self._clock()) else _MAX_CHUNKS

    def _pays(self, wait: Wait) -> bool:
        """Whether the pages not asked for yet are read faster than computed."""
        num_pages = wait.end - wait.next_page
        if self.store_speed.is_stale(self._clock()):
            return True  # a few, to know
        load_s = self.store_speed.seconds_for(num_pages * self._page_bytes)
        compute_s = self.prefill_speed.seconds_for(num_pages * self._page_size)
        if should_load(load_s, compute_s):
            return True
        self.num_recomputed_pages += num_pages
        wait.miss = wait.miss or MissReason.RECOMPUTED
        return False

    def _next_pages(self, wait: Wait) -> int:
        num_pages = wait.end - wait.next_page
        if not self.store_speed.is_stale(self._clock()):
            return min(num_pages, self._chunk_pages)
        load_s = self.store_speed.seconds_for(num_pages * self._page_bytes)
        compute_s = self.prefill_speed.seconds_for(num_pages * self._page_size)
        return pages_to_probe(load_s, compute_s, num_pages, self._chunk_pages)

    def _fetch(self, wait: Wait) -> bool:
        num_pages = self._next_pages(wait)
        if self._host.num_available < num_pages:
            return False
        first, slots = wait.next_page, self._host.take(num_pages)
        begin = first - wait.first_page
        move_id = self._transfers.submit(
            MoveKind.FETCH,
            [],
            lambda flight, result: self._on_fetched(wait, first, flight, result),
            keys=tuple(wait.hashes[begin : begin + num_pages]),
            slots=tuple(slots),
            urgent=True,
        )
        if move_id is None:
            self._host.allocator.free(slots)
            return False
        wait.move_ids[move_id] = first
        wait.next_page = first + num_pages
        return True

    def _on_fetched(self, wait: Wait, first: int, flight: Flight, result: MoveResult) -> None:
        slots = list(flight.move.slots)
        self.num_fetched_bytes += result.num_bytes
        self.fetch_s += result.seconds
        self.store_speed.add(result.num_bytes, result.seconds, self._clock())
        wait.move_ids.pop(result.move_id, None)
        if wait.is_over:
            self._host.allocator.free(slots)
            return
        wait.arrived[first] = (slots, result.num_done)
        if result.num_done < len(slots):
            wait.miss = MissReason.LOAD_FAILED
            wait.end = min(wait.end, first + result.num_done)
            if result.failure in (MoveFailure.MISSING, MoveFailure.CORRUPT):
                self._note_gone(wait, first + result.num_done)
        while not wait.is_over and wait.done_page in wait.arrived:
            self._take_in(wait, *wait.arrived.pop(wait.done_page))
        if not wait.is_over:
            self._go_on(wait)

    def _note_gone(self, wait: Wait, first: int) -> None:
        """The store has not got page `first`: runs that have it and what follows are to be put
        again when they are computed."""
        end = 0
        limit = wait.first_page + len(wait.hashes)
        for run, num_equal in self._index.match(wait.salt, wait.packed, limit):
            end += num_equal
            if end > first:
                run.stored = False

    def _take_in(self, wait: Wait, slots: list[int], num_filled: int) -> None:
        """Pages that follow all those before: give their slots to the runs of the tree."""
        if not num_filled:
            self._host.allocator.free(slots)
            return
        size, begin = TOKEN_BYTES * self._page_size, wait.done_page
        end = begin + num_filled
        at, parent = 0, self._index.root(wait.salt)
        for found, num_equal in self._index.match(wait.salt, wait.packed, end):
            run = found
            if num_equal < found.num_pages:
                run = self._index.split(found, num_equal)
            if at < begin < at + num_equal:
                self._index.split(run, begin - at)
                at, num_equal = begin, num_equal - (begin - at)
            if at >= begin:
                self._settle(wait, run, slots[at - begin : at - begin + num_equal])
            at, parent = at + num_equal, run
        if at < end:
            run = self._index.add(parent, wait.packed[at * size : end * size])
            self._settle(wait, run, slots[at - begin : num_filled])
        self._host.allocator.free(slots[num_filled:])
        self.num_fetched_pages += num_filled
        wait.done_page = end

    def _settle(self, wait: Wait, run: Run, slots: list[int]) -> None:
        """`run` is in the store, and its pages are in these slots unless it has some already."""
        run.note_stored(self._clock())
        if wait.claim not in run.claims:
            wait.claim.add(run)
        if run.slots:
            self._host.allocator.free(slots)
            return
        run.slots = slots
        self._host.order.add(run)
        self._log.stored(run, "host")

    def _finish(self, wait: Wait) -> None:
        """The sequence goes on with what has come; what is under way is not waited for."""
        wait.is_over = True
        wait.load_s = self._clock() - wait.began_s - wait.lookup_s
        for move_id in list(wait.move_ids):
            self._transfers.cancel(move_id)
        for slots, _ in wait.arrived.values():
            self._host.allocator.free(slots)
        wait.arrived.clear()
        self._over.append(wait.key)
        if wait.hashes and self._leaders.get(wait.hashes[0]) == wait.key:
            del self._leaders[wait.hashes[0]]
            self._wake_followers(wait)

    def _wake_followers(self, leader: Wait) -> None:
        """Those that waited for the same pages look again, from where they are now."""
        for wait in list(self._waits.values()):
            if wait.is_over or wait.move_ids or wait.hashes[0] != leader.hashes[0]:
                continue
            if wait.next_page > wait.first_page:
                continue
            if self._clock() >= wait.deadline_s:
                wait.miss = MissReason.LOAD_FAILED
                self._finish(wait)  # it has no time left to look again
                continue
            limit = wait.first_page + len(wait.hashes)
            deadline_s, began_s = wait.deadline_s, wait.began_s
            self.end_claim(wait)
            del self._waits[wait.key]
            if self.begin(wait.key, wait.salt, wait.packed, limit):
                again = self._waits[wait.key]
                again.deadline_s, again.began_s = deadline_s, began_s
            else:
                self._waits.setdefault(wait.key, wait).is_over = True
                self._over.append(wait.key)

    def end_claim(self, wait: Wait) -> None:
        """Nothing needs to stay for `wait` any more."""
        for run in reversed(wait.claim.end()):
            self._index.prune(run)
