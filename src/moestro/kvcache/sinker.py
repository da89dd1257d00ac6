"""Sinker: takes computed runs down, from device to host and from host to store."""

from collections.abc import Callable, Iterator

from moestro.core.page_moves import MoveFailure, MoveKind, MoveResult
from moestro.kvcache.claim import Claim
from moestro.kvcache.event_log import EventLog
from moestro.kvcache.prefix_index import PrefixIndex
from moestro.kvcache.run import Run
from moestro.kvcache.tier import Tier
from moestro.kvcache.tier_policy import (
    TierConfig,
    WritePolicy,
    pages_per_move,
    pages_to_clean,
    should_sink,
)
from moestro.kvcache.transfers import Flight, Transfers

_BELIEVED_S = 60.0
"""How long the store is believed to keep what it has said that it has."""


class Sinker:
    """Runs are offered when they are published and when they are found again.

    A run that grows is saved once it fills a move or nobody holds it any more. A move that the
    mover refuses, or for which no host slot can be had, is not made: the run is offered again
    when it is found again. So nothing queues up here beyond the runs that grow now.

    A store evicts without telling. What it said that it has is looked up again when it is found
    again, or is about to leave the device under write_back, and put anew if it is gone.
    """

    def __init__(
        self,
        config: TierConfig,
        index: PrefixIndex,
        device: Tier,
        host: Tier,
        transfers: Transfers,
        log: EventLog,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._index = index
        self._device = device
        self._host = host
        self._transfers = transfers
        self._log = log
        self._clock = clock
        self._chunk_pages = pages_per_move(transfers.page_bytes, config.move_chunk_bytes)
        self._offered: dict[Run, None] = {}
        self._doubted: dict[Run, None] = {}
        self.num_saved_pages = 0
        self.num_put_pages = 0
        self.num_dropped_pages = 0
        """Pages whose way down was given up: refused, no slot, or failed."""

    def offer(self, tail: Run, until: Run | None = None) -> None:
        """A sequence has published or found the runs from `tail` up to `until` (or the root)."""
        if not self._host.num_pages:
            return
        run, now_s = tail, self._clock()
        while run.parent is not None:
            if self._should_sink(run):
                self._offered[run] = None
            self._doubt(run, now_s)
            if run is until:
                return
            run = run.parent

    def pump(self) -> None:
        """Start what can be started; once a step."""
        if self._config.write_policy is WritePolicy.WRITE_BACK and self._host.num_pages:
            self._offer_next_victims()
        for run in list(self._offered):
            is_growing = run.num_holders and not (run.children or run.slots)
            if is_growing and run.num_pages < self._chunk_pages and self._is_wanted(run):
                continue
            del self._offered[run]
            self._sink_path(run)
        doubted, self._doubted = self._doubted, {}
        for run in doubted:
            if run.stored and not any(claim.sinks for claim in run.claims):
                keys = tuple(self._index.name_pages(run))
                run.stored_s = self._clock()  # not asked every step while it gives no answer
                self._transfers.submit(MoveKind.LOOKUP, [run], self._on_looked_up, keys=keys)

    def _doubt(self, run: Run, now_s: float) -> None:
        """Look `run` up again if the store has not said for long that it has it."""
        if run.stored and self._sinks_to_store and now_s - run.stored_s > _BELIEVED_S:
            self._doubted[run] = None

    def _should_sink(self, run: Run) -> bool:
        config = self._config
        return should_sink(
            config.write_policy, run.num_hits, config.selective_hits
        ) and self._is_wanted(run)

    def _sink_path(self, run: Run) -> None:
        """Sink `run`, and before it what was split off above it since it was offered."""
        path = []
        above: Run | None = run
        while above is not None and self._is_wanted(above):
            path.append(above)
            above = above.parent
        for wanted in reversed(path):
            self._sink(wanted)

    def _is_wanted(self, run: Run) -> bool:
        """Whether there is a tier that `run` should be in and is not, nor on its way to."""
        if run.stored or any(claim.sinks for claim in run.claims):
            return False
        if run.slots:
            return self._sinks_to_store
        return bool(run.pages) and (self._config.keeps_host or self._sinks_to_store)

    @property
    def _sinks_to_store(self) -> bool:
        return self._transfers.has_store and not self._config.host_is_lossy

    def _sink(self, run: Run) -> None:
        """Send `run` down, in pieces that fill a move each."""
        while self._is_wanted(run):
            piece = run
            if run.num_pages > self._chunk_pages:
                piece = self._index.split(run, self._chunk_pages)
            start = self._put if piece.slots else self._save
            if not start(piece):
                self.num_dropped_pages += piece.num_pages
                piece.tried_at = run.tried_at = -1
                return
            if piece is run:
                return

    def _save(self, run: Run) -> bool:
        if self._host.num_available < run.num_pages:
            return False
        claim = Claim(self._index, on_device=True, on_host=False)
        claim.add(run)  # what is evicted now must not be joined with it
        slots = self._host.take(run.num_pages)
        claim.end()
        move_id = self._transfers.submit(
            MoveKind.SAVE, [run], self._on_saved, pages=tuple(run.pages), slots=tuple(slots)
        )
        if move_id is None:
            self._host.allocator.free(slots)
        return move_id is not None

    def _put(self, run: Run) -> bool:
        keys = tuple(self._index.name_pages(run))
        move_id = self._transfers.submit(
            MoveKind.PUT, [run], self._on_put, keys=keys, slots=tuple(run.slots)
        )
        return move_id is not None

    def _on_saved(self, flight: Flight, result: MoveResult) -> None:
        slots, begin = flight.move.slots, 0
        for _, end, saved in self._what_is_done(flight, result):
            used = 0
            if saved is not None and not saved.slots:
                used = saved.num_pages
                saved.slots = list(slots[begin : begin + used])
                self._host.order.add(saved)
                self._log.stored(saved, "host")
                self.num_saved_pages += used
                if self._is_wanted(saved) and not self._put(saved):
                    self.num_dropped_pages += used
            self._host.allocator.free(slots[begin + used : end])
            begin = end

    def _on_put(self, flight: Flight, result: MoveResult) -> None:
        for _, _, stored in self._what_is_done(flight, result):
            if stored is not None:
                stored.note_stored(self._clock())
                self.num_put_pages += stored.num_pages
                self._log.stored(stored, "store")

    def _on_looked_up(self, flight: Flight, result: MoveResult) -> None:
        """What is gone in part is put again whole: the store takes what it has as done."""
        begin, runs = 0, flight.claim.end()
        for run in runs:
            num_there = result.num_done - begin
            begin += run.num_pages
            if num_there >= run.num_pages:
                run.note_stored(self._clock())
            elif result.failure is MoveFailure.MISSING:
                run.stored = False
                self._log.removed(run, "store", max(0, num_there))
                if self._should_sink(run):
                    self._offered[run] = None
        self._tidy(runs)

    def _what_is_done(
        self, flight: Flight, result: MoveResult
    ) -> Iterator[tuple[Run, int, Run | None]]:
        """Each run of a move that has ended, where it ends within the move, and what of it is
        done: all, its first pages (split off now) or nothing. After the last of them those that
        share one fate now are joined, so that moves leave no more runs behind than they found.
        """
        begin = 0
        runs = flight.claim.end()
        for run in runs:
            end = begin + run.num_pages
            num_done = min(end, result.num_done) - begin
            if num_done <= 0:
                done = None
            else:
                done = run if num_done == run.num_pages else self._index.split(run, num_done)
            self.num_dropped_pages += end - begin - max(0, num_done)
            yield run, end, done
            begin = end
        self._tidy(runs)

    def _tidy(self, runs: list[Run]) -> None:
        """A move claims these no more."""
        for run in reversed(runs):
            self._index.prune(run)
            if run.parent is not None:
                self._index.join(run)
                self._index.join(run.parent)

    def _offer_next_victims(self) -> None:
        """write_back: save what the device will evict next, before it has to.

        Once for each time it was found: where the copies don't stay (few slots, a store that
        takes nothing), saving them again and again would keep their pages from everybody.
        """
        config, device = self._config, self._device
        wanted = pages_to_clean(
            device.allocator.num_free, device.num_pages, config.low_water, config.high_water
        )
        wanted -= device.allocator.num_free
        now_s = self._clock()
        for run in device.order:
            if wanted <= 0:
                return
            wanted -= run.num_pages
            self._doubt(run, now_s)
            if run.tried_at != run.num_hits and self._is_wanted(run) and not run.slots:
                run.tried_at = run.num_hits
                self._offered[run] = None
