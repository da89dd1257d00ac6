"""KV events: what a prefix-aware router hears of the pages that a cache holds, as plain data."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Pages in order, each the child of the one before; parent_hash of the first.

    parent_hash None: the first page of a prompt. medium: device, host or store.
    """

    page_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    token_ids: tuple[int, ...]
    page_size: int
    medium: str


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Pages that `medium` no longer holds."""

    page_hashes: tuple[bytes, ...]
    medium: str


KVEvent: TypeAlias = PagesStored | PagesRemoved
