"""BlockingStore: what one kind of store has to do. Everything else is done once, in threaded.py.

A backend moves bytes under keys and waits as long as its deadline allows. It knows nothing of
futures, threads, checksums or namespaces beyond the first 16 bytes of a key.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

from moestro.core.page_moves import MoveFailure
from moestro.core.page_store import StoreError
from moestro.kvstore.codec import DIGEST_BYTES, HASH_BYTES, Value

T = TypeVar("T")

KEY_BYTES = DIGEST_BYTES + HASH_BYTES
"""A key: the namespace digest, then the page hash."""


class Deadline:
    """A moment of the monotonic clock, after which nobody waits for the answer any more."""

    def __init__(self, timeout_s: float) -> None:
        self._at = time.monotonic() + timeout_s

    def end(self) -> None:
        """Let it have passed: the answer was given by somebody else. For any thread."""
        self._at = 0.0

    @property
    def remaining_s(self) -> float:
        """Never negative."""
        return max(0.0, self._at - time.monotonic())

    def check(self) -> None:
        """Raise StoreError when it has passed."""
        if not self.remaining_s:
            raise StoreError(MoveFailure.TIMEOUT, "the store took longer than its timeout")


@dataclass(frozen=True, slots=True)
class Namespace:
    """The pages under one digest. num_bytes: of whole values."""

    digest: bytes
    num_pages: int
    num_bytes: int


class BlockingStore(Protocol):
    """Values under 32-byte keys. One thread reads and another one writes, at the same time.

    Failures raise StoreError, and only that. A call that has passed its deadline may do what it
    likes with its answer, but must leave nothing in the store that isn't whole.
    """

    @property
    def capacity_bytes(self) -> int:
        """Budget; 0 where the server has its own."""

    def get_many(self, keys: Sequence[bytes], deadline: Deadline) -> list[Value | None]:
        """Whole values that the caller owns, or None; a use of each that is there."""

    def put_many(self, values: Sequence[tuple[bytes, Value]], deadline: Deadline) -> int:
        """Each value whole or not at all; how many are now there, counted from the front. What
        is there already is not written again. Fewer than given: no room for the next one.
        """

    def exists_many(self, keys: Sequence[bytes], deadline: Deadline) -> list[bool]: ...

    def delete(self, keys: Sequence[bytes], deadline: Deadline) -> int:
        """How many were there."""

    def scan(self, prefix: bytes) -> Iterator[bytes]:
        """Keys that start with `prefix`, a digest or nothing, while others may write."""

    def namespaces(self) -> list[Namespace]:
        """What the store holds, by digest."""

    @property
    def num_evicted(self) -> int:
        """Pages that had to go for others since this was made; 0 where the server decides."""

    def totals(self) -> tuple[int | None, int | None]:
        """Bytes in use and pages, as last seen; None where only the server knows. Never waits."""

    def maintain(self) -> None:
        """Called by the writing thread every few seconds, and before close."""

    def close(self) -> None:
        """Called once, by the writing thread."""


def runs(items: Iterable[T], length: int) -> Iterator[list[T]]:
    """Consecutive items, so many at a time."""
    rest = iter(items)
    while run := list(islice(rest, length)):
        yield run
