"""LowerTiers: what lies below the device: the host tier, the store, and the ways there."""

from collections import deque
from collections.abc import Callable

from moestro.core.kv_hints import PrefixUse
from moestro.core.page_moves import MoveKind, MoverState, PageLoad, PageMover
from moestro.kvcache.claim import Claim
from moestro.kvcache.device_tier import DeviceTier
from moestro.kvcache.event_log import EventLog
from moestro.kvcache.fetcher import Fetcher, Wait
from moestro.kvcache.prefix_index import PrefixIndex
from moestro.kvcache.run import Run
from moestro.kvcache.sinker import Sinker
from moestro.kvcache.tier import Tier
from moestro.kvcache.tier_policy import TierConfig, WritePolicy
from moestro.kvcache.transfers import Transfers


class LowerTiers:
    """Sinking, fetching and loading; without a mover all of it does nothing.

    Loads: a step that is being planned gives device pages to runs that are in host slots only;
    both stay where they are until the step's output is there.
    """

    def __init__(
        self,
        config: TierConfig,
        index: PrefixIndex,
        device: DeviceTier,
        mover: PageMover | None,
        log: EventLog,
        clock: Callable[[], float],
    ) -> None:
        self.page_bytes = page_bytes = mover.page_bytes if mover is not None else 0
        self._config = config
        self._index = index
        self._mover = mover
        self.host = Tier(config.num_host_slots if mover is not None else 0, index, "host", log)
        self.transfers = Transfers(mover, index)
        self.sinker = Sinker(config, index, device, self.host, self.transfers, log, clock)
        self.fetcher = Fetcher(config, index, self.host, self.transfers, log, page_bytes, clock)
        self.writes_back = config.write_policy is WritePolicy.WRITE_BACK
        self.num_loaded_pages = 0
        self.load_bytes = 0
        self.load_s = 0.0
        self.hits_tokens = {"device": 0, "host": 0, "store": 0}
        self._new_loads = Claim(index, on_device=True, on_host=True)
        self._open_steps: deque[Claim] = deque()

    def mover_state(self) -> MoverState | None:
        """None without a tier below the device."""
        return None if self._mover is None else self._mover.state()

    @property
    def has_store(self) -> bool:
        return self.transfers.has_store

    @property
    def is_busy(self) -> bool:
        """Whether something is under way that poll may tell of."""
        return bool(self.transfers.num_in_flight)

    def load(self, runs: list[Run]) -> None:
        """`runs` have got device pages: the step being planned fills them from their slots."""
        for run in runs:
            self._new_loads.add(run)
            self.num_loaded_pages += run.num_pages

    def take_loads(self) -> tuple[PageLoad, ...]:
        """The loads of the step being planned, which is open from now on."""
        claim = self._new_loads
        self._open_steps.append(claim)
        self._new_loads = Claim(self._index, on_device=True, on_host=True)
        return tuple(PageLoad(tuple(run.slots), tuple(run.pages)) for run in claim.runs)

    def end_loads(self, load_bytes: int, load_s: float) -> bool:
        """The oldest open step is over; whether it had loads."""
        self.load_bytes += load_bytes
        self.load_s += load_s
        runs = self._open_steps.popleft().end() if self._open_steps else []
        for run in runs:
            self._index.prune(run)
        return bool(runs)

    def published(self, tail: Run, before: Run) -> None:
        """A sequence's published prefix ends with `tail` now; it ended with `before`."""
        self.sinker.offer(tail, before)

    def found(self, tail: Run) -> None:
        """A sequence shares the runs up to `tail`."""
        self.sinker.offer(tail)

    def end_wait(self, seq_id: int) -> Wait | None:
        """The sequence is admitted or has ended: what it waited for may go. Its wait, if any."""
        wait = self.fetcher.take(seq_id)
        if wait is not None:
            self.fetcher.end_claim(wait)
        return wait

    def forget(self, runs: list[Run]) -> None:
        """Have pages deleted from the store, as far as it takes that now; before they are dropped
        here, as their names come from what they follow. Nothing waits for it."""
        keys = tuple(key for run in runs for key in self._index.name_pages(run))
        if keys and self.has_store:
            self.transfers.submit(MoveKind.DELETE, [], lambda *_: None, keys=keys)
        for run in runs:
            run.stored = False

    def poll(self) -> tuple[list[int], bool]:
        """Sequences whose wait is over, and whether pages may have become available."""
        if self._mover is None:
            return [], False
        has_news = self.transfers.poll()
        self.sinker.pump()
        config = self._config
        if config.keeps_host:
            self.host.trim(config.low_water, config.high_water)
        else:
            self.host.trim(0.0, 0.0)
        return self.fetcher.poll(), has_news

    def count(self, prefix: PrefixUse) -> None:
        """A first admission's hits."""
        self.hits_tokens["device"] += prefix.device_tokens
        self.hits_tokens["host"] += prefix.host_tokens
        self.hits_tokens["store"] += prefix.store_tokens
