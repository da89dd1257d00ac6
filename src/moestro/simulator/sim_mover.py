"""VirtualMover: a PageMover that moves no byte and takes the time that moving them would."""

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields

from moestro.core.page_moves import Move, MoveFailure, MoveKind, MoveResult, MoverState
from moestro.errors import ConfigError
from moestro.simulator.clock import VirtualClock


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCosts:
    """Bytes a second of each direction, and what a call of the store takes beside.

    max_queued_bytes: accepted and not yet moved, of the urgent moves and of the others.
    """

    save_bytes_per_s: float = 20e9
    put_bytes_per_s: float = 2e9
    fetch_bytes_per_s: float = 4e9
    store_call_s: float = 0.001
    max_queued_bytes: float = 64e9

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (0 < value < math.inf):
                raise ConfigError(f"{field.name} must be positive, got {value}.")


class VirtualMover:
    """Two lanes, as the real mover has: urgent moves don't wait for the others.

    A store of num_store_pages forgets the page that was read or written longest ago; 0: no store.
    """

    def __init__(
        self, clock: VirtualClock, costs: MoveCosts, page_bytes: int, num_store_pages: int
    ) -> None:
        self.page_bytes = page_bytes
        self._clock = clock
        self._costs = costs
        self._capacity = num_store_pages
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        self._free_at = {True: 0.0, False: 0.0}
        self._under_way: list[tuple[float, int, Move, float]] = []
        self._cancelled: set[int] = set()
        self._num_queued = {True: 0, False: 0}

    @property
    def has_store(self) -> bool:
        """See PageMover."""
        return self._capacity > 0

    def submit(self, move: Move) -> bool:
        """See PageMover."""
        if move.kind is not MoveKind.SAVE and not self.has_store:
            return False
        num_pages = len(move.keys) or len(move.pages)
        queued = self._num_queued[move.urgent]
        if queued and (queued + len(move.slots)) * self.page_bytes > self._costs.max_queued_bytes:
            return False
        seconds = self._seconds(move.kind, num_pages)
        begin = max(self._clock.now_s, self._free_at[move.urgent])
        self._free_at[move.urgent] = begin + seconds
        heapq.heappush(self._under_way, (begin + seconds, move.move_id, move, seconds))
        self._num_queued[move.urgent] += len(move.slots)
        return True

    def cancel(self, move_id: int) -> None:
        """See PageMover."""
        self._cancelled.add(move_id)

    def poll(self) -> Sequence[MoveResult]:
        """See PageMover."""
        results = []
        while self._under_way and self._under_way[0][0] <= self._clock.now_s:
            _, move_id, move, seconds = heapq.heappop(self._under_way)
            self._num_queued[move.urgent] -= len(move.slots)
            if move_id in self._cancelled:
                self._cancelled.remove(move_id)
                results.append(MoveResult(move_id, 0, failure=MoveFailure.CANCELLED))
            else:
                results.append(self._finish(move, seconds))
        return results

    def wait(self, timeout_s: float) -> None:
        """See PageMover: the clock goes on to the next result."""
        until = self._clock.now_s + timeout_s
        if self._under_way:
            until = min(until, self._under_way[0][0])
        self._clock.advance_to(until)

    def state(self) -> MoverState:
        """See PageMover."""
        return MoverState(
            num_queued_bytes=sum(self._num_queued.values()) * self.page_bytes,
            store_bytes=len(self._stored) * self.page_bytes,
            store_capacity_bytes=self._capacity * self.page_bytes,
            breaker="closed" if self.has_store else "none",
        )

    def close(self, timeout_s: float) -> None:  # noqa: ARG002
        """See PageMover."""
        self._under_way.clear()

    def _seconds(self, kind: MoveKind, num_pages: int) -> float:
        num_bytes = num_pages * self.page_bytes
        if kind is MoveKind.SAVE:
            return num_bytes / self._costs.save_bytes_per_s
        if kind in (MoveKind.LOOKUP, MoveKind.DELETE):
            return self._costs.store_call_s
        is_put = kind is MoveKind.PUT
        rate = self._costs.put_bytes_per_s if is_put else self._costs.fetch_bytes_per_s
        return self._costs.store_call_s + num_bytes / rate

    def _finish(self, move: Move, seconds: float) -> MoveResult:
        if move.kind is MoveKind.SAVE:
            num_done = len(move.pages)
        elif move.kind is MoveKind.PUT:
            num_done = len(move.keys)
            self._store(move.keys)
        elif move.kind is MoveKind.DELETE:
            num_done = len(move.keys)
            for key in move.keys:
                self._stored.pop(key, None)
        else:
            num_done = self._num_stored(move.keys)
            if move.kind is MoveKind.FETCH:
                self._store(move.keys[:num_done])
        is_short = num_done < (len(move.keys) or len(move.pages))
        num_bytes = (
            0 if move.kind in (MoveKind.LOOKUP, MoveKind.DELETE) else num_done * self.page_bytes
        )
        failure = MoveFailure.MISSING if is_short else None
        return MoveResult(move.move_id, num_done, num_bytes, seconds, failure)

    def _num_stored(self, keys: Sequence[bytes]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self._stored), len(keys))

    def _store(self, keys: Sequence[bytes]) -> None:
        """These were used, the first of them last: a prefix outlives what follows it."""
        for key in reversed(keys):
            self._stored[key] = None
            self._stored.move_to_end(key)
        while len(self._stored) > self._capacity:
            self._stored.popitem(last=False)
