"""PageStore: what a KV store offers. Every call returns a future and never blocks the caller."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from moestro.core.page_moves import MoveFailure
from moestro.errors import MoestroError

Payload: TypeAlias = bytes | bytearray | memoryview
"""The bytes of one page in the canonical layout."""


class StoreError(MoestroError):
    """A call of a store that failed as a whole; `failure` says how."""

    def __init__(self, failure: MoveFailure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """bytes_used and num_pages: None where the store can't tell. capacity_bytes 0: its server's
    own limit. breaker: closed, open or half_open. num_evicted: pages that went for others."""

    bytes_used: int | None
    num_pages: int | None
    capacity_bytes: int
    breaker: str
    num_quarantined: int = 0
    num_evicted: int = 0


class PageStore(Protocol):
    """Pages by content address (16-byte keys) under one namespace digest.

    Futures raise StoreError and nothing else; each is done within the store's timeout, whatever
    its server, disk or another process does.
    """

    def get_many(self, keys: Sequence[bytes]) -> "Future[list[Payload | MoveFailure]]":
        """Each page, or why it can't be had: missing, or corrupt when any check of it failed
        (it is quarantined: a miss from then on). A payload is valid as long as it is referenced.
        """

    def put_many(self, pages: Sequence[tuple[bytes, Payload]]) -> "Future[int]":
        """Write pages atomically each; how many are now stored, counted from the front. A page
        that is there already counts. The payloads may be reused once the future is done.
        """

    def exists_many(self, keys: Sequence[bytes]) -> "Future[list[bool]]": ...

    def delete(self, keys: Sequence[bytes]) -> "Future[int]":
        """How many were there."""

    def scan(self) -> Iterator[bytes]:
        """Keys of this namespace. Blocks: for tools."""

    def usage(self) -> StoreUsage: ...

    def close(self, timeout_s: float) -> None:
        """Write what is pending, for at most so long, and let go. Idempotent."""
