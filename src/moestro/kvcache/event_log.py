"""EventLog: which pages came and went, for routers that place requests by them."""

import sys
from array import array

from moestro.core.kv_events import KVEvent, PagesRemoved, PagesStored
from moestro.kvcache.prefix_index import PrefixIndex
from moestro.kvcache.run import Run

_MAX_EVENTS = 100_000


class EventLog:
    """Records only when asked to, and at most so many events that nobody takes."""

    def __init__(self, index: PrefixIndex, page_size: int, enabled: bool) -> None:
        self._index = index
        self._page_size = page_size
        self._enabled = enabled
        self._events: list[KVEvent] = []

    def stored(self, run: Run, medium: str, first_page: int = 0) -> None:
        """The pages of `run` from `first_page` on are there now."""
        if not self._enabled:
            return
        hashes = self._index.name_pages(run)
        parent: bytes | None = None
        salt = ""
        if first_page:
            parent = hashes[first_page - 1]
        elif run.parent is not None and not run.parent.is_root:
            parent = self._index.parent_hash(run)
        else:
            salt = self._index.salt_of(run)
        num_bytes = 4 * first_page * self._page_size
        tokens = array("I", bytes(run.tokens[num_bytes:]))
        if sys.byteorder == "big":
            tokens.byteswap()
        self._add(
            PagesStored(
                tuple(hashes[first_page:]),
                parent,
                tuple(tokens),
                self._page_size,
                medium,
                salt,
                session_of(run),
            )
        )

    def removed(self, run: Run, medium: str, first_page: int = 0) -> None:
        """The pages of `run` from `first_page` on are to go."""
        if self._enabled:
            self._add(PagesRemoved(tuple(self._index.name_pages(run)[first_page:]), medium))

    def take(self) -> list[KVEvent]:
        """What was recorded since the last call."""
        events, self._events = self._events, []
        return events

    def _add(self, event: KVEvent) -> None:
        if len(self._events) < _MAX_EVENTS:
            self._events.append(event)


def session_of(run: Run) -> str | None:
    """The client's name for the one session that has used `run`, if it has one."""
    owner = run.owner
    return None if owner is None or owner.startswith("\0") else owner
