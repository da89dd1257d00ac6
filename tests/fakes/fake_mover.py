"""A PageMover without bytes or threads: moves end when, how and in what order a test says."""

from collections.abc import Callable

from moestro.core.page_moves import Move, MoveFailure, MoveKind, MoveResult, MoverState

Content = tuple[object, ...]


class FakeMover:
    """Keeps what each host slot and stored page stands for, and asserts the contract of moves.

    read_page: what a device page holds now; what a move reads must not change while it is under
    way, and what it writes is nobody else's. wait ends the oldest move, so that a loop that waits
    goes on. Content is found by its key: one key never gets two contents.
    """

    def __init__(
        self,
        page_bytes: int = 1,
        has_store: bool = True,
        max_moves: int = 1000,
        read_page: Callable[[int], Content] | None = None,
    ) -> None:
        self.page_bytes = page_bytes
        self.has_store = has_store
        self.max_moves = max_moves
        self.read_page = read_page or (lambda page: ())
        self.host: dict[int, Content] = {}
        self.store: dict[bytes, Content] = {}
        self.queued: list[Move] = []
        self.submitted: list[Move] = []
        self.cancelled: set[int] = set()
        self.num_refused = 0
        self.seconds_a_page = 0.001
        self.is_closed = False
        self._results: list[MoveResult] = []
        self._seen: dict[int, tuple[Content, ...]] = {}

    def submit(self, move: Move) -> bool:
        assert not self.is_closed
        _check_lengths(move)
        if len(self.queued) >= self.max_moves:
            self.num_refused += 1
            return False
        written = {slot for other in self.queued for slot in _written(other)}
        read = {slot for other in self.queued for slot in _read(other)}
        assert written.isdisjoint(move.slots), "a slot that a move writes is used by another"
        if move.kind in (MoveKind.SAVE, MoveKind.FETCH):
            assert read.isdisjoint(move.slots), "a slot that a move reads is overwritten"
        self._seen[move.move_id] = self._sources(move)
        self.queued.append(move)
        self.submitted.append(move)
        return True

    def cancel(self, move_id: int) -> None:
        self.cancelled.add(move_id)

    def finish(
        self, at: int = 0, num_done: int | None = None, failure: MoveFailure | None = None
    ) -> MoveResult:
        """End a queued move: all of it, or its first num_done pages."""
        move = self.queued.pop(at)
        sources = self._sources(move)
        assert sources == self._seen.pop(move.move_id), "what a move reads has changed under it"
        num_pages = len(move.keys) or len(move.slots)
        possible = num_pages
        if move.kind in (MoveKind.FETCH, MoveKind.LOOKUP):
            possible = next(
                (i for i, key in enumerate(move.keys) if key not in self.store), num_pages
            )
        if num_done is None or num_done >= possible:
            num_done = possible
            failure = None if possible == num_pages else MoveFailure.MISSING
        elif failure is None:
            failure = MoveFailure.ERROR
        self._copy(move, num_done, sources)
        moved = 0 if move.kind in (MoveKind.LOOKUP, MoveKind.DELETE) else num_done
        result = MoveResult(
            move.move_id,
            num_done,
            moved * self.page_bytes,
            moved * self.seconds_a_page,
            failure,
        )
        self._results.append(result)
        return result

    def finish_all(self) -> None:
        """End all queued moves in order, completely."""
        while self.queued:
            self.finish()

    def poll(self) -> list[MoveResult]:
        results, self._results = self._results, []
        return results

    def wait(self, timeout_s: float) -> None:
        if self.queued and not self._results:
            self.finish()

    def state(self) -> MoverState:
        return MoverState(num_queued_bytes=len(self.queued) * self.page_bytes)

    def close(self, timeout_s: float) -> None:
        self.is_closed = True

    def _sources(self, move: Move) -> tuple[Content, ...]:
        if move.kind is MoveKind.SAVE:
            return tuple(self.read_page(page) for page in move.pages)
        if move.kind is MoveKind.PUT:
            return tuple(self.host[slot] for slot in move.slots)
        return ()

    def _copy(self, move: Move, num_done: int, sources: tuple[Content, ...]) -> None:
        for i in range(num_done):
            if move.kind is MoveKind.SAVE:
                self.host[move.slots[i]] = sources[i]
            elif move.kind is MoveKind.PUT:
                kept = self.store.setdefault(move.keys[i], sources[i])
                assert kept == sources[i], "one key for two contents"
            elif move.kind is MoveKind.DELETE:
                self.store.pop(move.keys[i], None)
            elif move.kind is MoveKind.FETCH:
                self.host[move.slots[i]] = self.store[move.keys[i]]


def _written(move: Move) -> tuple[int, ...]:
    return move.slots if move.kind in (MoveKind.SAVE, MoveKind.FETCH) else ()


def _read(move: Move) -> tuple[int, ...]:
    return move.slots if move.kind is MoveKind.PUT else ()


def _check_lengths(move: Move) -> None:
    uses = {
        MoveKind.SAVE: (move.pages, move.slots),
        MoveKind.PUT: (move.slots, move.keys),
        MoveKind.FETCH: (move.keys, move.slots),
        MoveKind.LOOKUP: (move.keys,),
        MoveKind.DELETE: (move.keys,),
    }[move.kind]
    assert len(uses[0]) > 0, "a move of nothing"
    assert len({len(part) for part in uses}) == 1, "parts of unequal lengths"
    for ids in (move.pages, move.slots):
        assert len(set(ids)) == len(ids), "a page or slot twice in a move"
