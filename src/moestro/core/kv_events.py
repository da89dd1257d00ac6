"""KV events: what a prefix-aware router hears of the pages that a cache holds, as plain data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Pages in order, each the child of the one before; parent_hash of the first.

    parent_hash None: the first page of a prompt. medium: device, host or store. cache_salt: of
    the first page of a prompt, the tenant's; other pages have it by their parent. session_id: of
    the one session that has used them so far, if that has a name.
    """

    page_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    token_ids: tuple[int, ...]
    page_size: int
    medium: str
    cache_salt: str = ""
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Pages that `medium` no longer holds."""

    page_hashes: tuple[bytes, ...]
    medium: str


KVEvent: TypeAlias = PagesStored | PagesRemoved


class KVEventSink(Protocol):
    """Where events go. Nothing here waits, but close."""

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Take what happened in one step."""

    def counts(self) -> tuple[int, int]:
        """Batches published and dropped so far."""

    def close(self) -> None:
        """Send what waits, for a bounded time. Repeatable."""
