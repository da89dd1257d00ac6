"""Transfers: moves that the mover has accepted, and what they hold until their results come."""

from collections.abc import Callable
from itertools import count

from moestro.core.page_moves import Move, MoveKind, MoveResult, PageMover
from moestro.kvcache.claim import Claim
from moestro.kvcache.prefix_index import PrefixIndex
from moestro.kvcache.run import Run


class Flight:
    """One accepted move. claim: of the runs it reads or fills; slots: host slots that are its own
    until its result."""

    __slots__ = ("claim", "done", "move")

    def __init__(
        self, move: Move, claim: Claim, done: "Callable[[Flight, MoveResult], None]"
    ) -> None:
        self.move = move
        self.claim = claim
        self.done = done


class Transfers:
    """Submits moves and hands results to whoever asked, pins and claims released."""

    def __init__(self, mover: PageMover | None, index: PrefixIndex) -> None:
        self._mover = mover
        self._index = index
        self._flights: dict[int, Flight] = {}
        self._ids = count()

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def page_bytes(self) -> int:
        """Of one page over all layers; 0 without a mover."""
        return 0 if self._mover is None else self._mover.page_bytes

    @property
    def has_store(self) -> bool:
        return self._mover is not None and self._mover.has_store

    def submit(
        self,
        kind: MoveKind,
        runs: list[Run],
        done: Callable[[Flight, MoveResult], None],
        *,
        keys: tuple[bytes, ...] = (),
        pages: tuple[int, ...] = (),
        slots: tuple[int, ...] = (),
        urgent: bool = False,
    ) -> int | None:
        """The id of the accepted move, which claims `runs` where it touches them; None: refused."""
        if self._mover is None:
            return None
        move = Move(next(self._ids), kind, keys, pages, slots, urgent)
        if not self._mover.submit(move):
            return None
        claim = Claim(self._index, kind is MoveKind.SAVE, kind is MoveKind.PUT, sinks=bool(runs))
        for run in runs:
            claim.add(run)
        self._flights[move.move_id] = Flight(move, claim, done)
        return move.move_id

    def cancel(self, move_id: int) -> None:
        """Ask for an early end; the result comes all the same."""
        if self._mover is not None and move_id in self._flights:
            self._mover.cancel(move_id)

    def poll(self) -> bool:
        """Take in every result that is there; whether there was any."""
        results = () if self._mover is None else self._mover.poll()
        for result in results:
            flight = self._flights.pop(result.move_id)
            flight.done(flight, result)
        return bool(results)

    def slots_in_flight(self) -> list[int]:
        """Host slots that are no run's but a move's. For checks."""
        return [
            slot
            for flight in self._flights.values()
            if flight.move.kind in (MoveKind.SAVE, MoveKind.FETCH)
            for slot in flight.move.slots
        ]
