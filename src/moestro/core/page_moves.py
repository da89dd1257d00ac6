"""KV pages on their way between device, host and store: what the manager asks, what comes back.

The manager accounts (hashes, page ids, host slots) and never sees a byte; a PageMover owns the
bytes and never decides. Nothing here waits: what has finished is polled once a step.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class MoveKind(enum.StrEnum):
    """save: device to host. put: host to store. fetch: store to host. lookup: is it stored? delete:
    out of the store."""

    SAVE = "save"
    PUT = "put"
    FETCH = "fetch"
    LOOKUP = "lookup"
    DELETE = "delete"


class MoveFailure(enum.StrEnum):
    """Why a move stopped short. missing: not in the store, no fault. corrupt: a check of what was
    read failed. timeout, unavailable, full, error: of the store. cancelled: as asked."""

    MISSING = "missing"
    CORRUPT = "corrupt"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    FULL = "full"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Move:
    """One job over a run of pages in order; equal lengths of what its kind uses.

    save: pages to slots. put: slots under keys. fetch: keys into slots. lookup, delete: keys.
    Pages and slots named here belong to the move until its result has been polled.
    urgent: a request waits for it; else it yields to the model's own work.
    """

    move_id: int
    kind: MoveKind
    keys: tuple[bytes, ...] = ()
    pages: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class MoveResult:
    """What became of a move: its first num_done pages are done, the others are not.

    num_bytes, seconds: moved, and how long it took from its start (not its submission), for
    bandwidths; of a fetch, what the store took for it alone. failure: set when num_done is short
    of all.
    """

    move_id: int
    num_done: int
    num_bytes: int = 0
    seconds: float = 0.0
    failure: MoveFailure | None = None


@dataclass(frozen=True, slots=True)
class PageLoad:
    """Host slots to device pages within the step that carries it: slots[i] fills pages[i].

    The runner has each layer in place before that layer's attention reads it. The slots belong
    to the load until the step's output is there.
    """

    slots: tuple[int, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MoverState:
    """Gauges and counters of a mover; counters only grow.

    num_queued_bytes: accepted and not yet moved. breaker: closed, open or half_open; "none"
    without a store. failures: by kind, of the store. num_store_evicted: pages, by this engine.
    """

    num_queued_bytes: int = 0
    store_bytes: int = 0
    store_capacity_bytes: int = 0
    breaker: str = "none"
    num_quarantined: int = 0
    failures: tuple[tuple[str, int], ...] = ()
    num_store_evicted: int = 0


class PageMover(Protocol):
    """Moves bytes on threads of its own. Every method returns at once, but wait and close."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""

    @property
    def has_store(self) -> bool:
        """Whether moves of the store are taken; may become true later, and never false."""

    def submit(self, move: Move) -> bool:
        """Take a move, or refuse it (False) when too much is queued: ask again later or not."""

    def cancel(self, move_id: int) -> None:
        """Stop a move early if possible; its result comes all the same."""

    def poll(self) -> Sequence[MoveResult]:
        """Results since the last call, each move's exactly once."""

    def wait(self, timeout_s: float) -> None:
        """Sleep until a result can be polled, at most so long."""

    def state(self) -> MoverState: ...

    def close(self, timeout_s: float) -> None:
        """Finish pending puts within so many seconds, then stop. Idempotent."""
