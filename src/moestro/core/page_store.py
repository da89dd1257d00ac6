"""PageStore: what a KV store offers. Every call returns a future and never blocks the caller."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol


class PageStore(Protocol):
    """Pages by content-address (16-byte keys). A read that fails any check is a miss (None)."""

    def get_many(self, keys: Sequence[bytes]) -> "Future[list[bytes | None]]": ...

    def put_many(self, pages: Sequence[tuple[bytes, bytes]]) -> "Future[None]": ...

    def exists_many(self, keys: Sequence[bytes]) -> "Future[list[bool]]": ...

    def delete(self, keys: Sequence[bytes]) -> "Future[int]": ...

    def scan(self) -> Iterator[bytes]: ...
