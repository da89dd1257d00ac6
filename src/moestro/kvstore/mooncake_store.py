"""Pages in a Mooncake Store: the memory of many machines behind one master.

mooncake://MASTER:PORT?segment_bytes=N&protocol=tcp&metadata=P2PHANDSHAKE&device=&host=ADDRESS.
segment_bytes: memory that this engine gives to the store (default 0: it only uses what others
give); host: the address at which others reach it. A full store refuses or evicts as its master is
configured. The master lists no keys over this interface, so scan and namespaces are refused.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import SplitResult, parse_qs

from mooncake.store import MooncakeDistributedStore

from moestro.core.page_moves import MoveFailure
from moestro.core.page_store import StoreError
from moestro.errors import ConfigError, shown, without_password
from moestro.kvstore.backend import Deadline, Namespace, runs
from moestro.kvstore.codec import DIGEST_BYTES, Value, join, split

DEFAULT_PORT = 50051
DEFAULTS = {
    "segment_bytes": "0",
    "protocol": "tcp",
    "metadata": "P2PHANDSHAKE",
    "device": "",
    "host": "127.0.0.1",
}
# A value passes through the client's own buffer, so it must fit there.
LOCAL_BUFFER_BYTES = 256 * 2**20
PAGES_A_TRIP = 4
# Error codes of Mooncake: no segment has room; the object is not there.
_NO_ROOM = (-200, -203)
_NOT_FOUND = -704


class MooncakeStore:
    """A BlockingStore over Mooncake's client. Raises ConfigError and StoreError."""

    capacity_bytes = 0
    num_evicted = 0

    def __init__(self, parts: SplitResult) -> None:
        options = _options(parts)
        self._master = f"{parts.hostname}:{parts.port or DEFAULT_PORT}"
        self._client: Any = MooncakeDistributedStore()
        code = self._client.setup(
            options["host"],
            options["metadata"],
            int(options["segment_bytes"]),
            LOCAL_BUFFER_BYTES,
            options["protocol"],
            options["device"],
            self._master,
        )
        if code:
            raise self._failure("setup", code)

    def get_many(self, keys: Sequence[bytes], deadline: Deadline) -> list[Value | None]:
        """See BlockingStore. Mooncake answers the same for a missing page and a failed one."""
        found: list[Value | None] = []
        for some in runs(keys, PAGES_A_TRIP):
            deadline.check()
            answers = self._client.get_batch(_names(some))
            found += [split(blob) if blob else None for blob in answers]
        return found

    def put_many(self, values: Sequence[tuple[bytes, Value]], deadline: Deadline) -> int:
        """See BlockingStore."""
        for i, (key, value) in enumerate(values):
            blob = join(value)
            deadline.check()  # after the copying: what is sent is what was to be stored
            code = self._client.put(_names([key])[0], blob)
            if code in _NO_ROOM:
                return i
            if code:
                raise self._failure("put", code)
        return len(values)

    def exists_many(self, keys: Sequence[bytes], deadline: Deadline) -> list[bool]:
        """See BlockingStore."""
        deadline.check()
        answers = self._client.batch_is_exist(_names(keys)) if keys else []
        if bad := [code for code in answers if code < 0]:
            raise self._failure("batch_is_exist", bad[0])
        return [answer == 1 for answer in answers]

    def delete(self, keys: Sequence[bytes], deadline: Deadline) -> int:
        """See BlockingStore. Forced: a page that was just read is under a lease."""
        deadline.check()
        codes = [self._client.remove(name, True) for name in _names(keys)]
        if bad := [code for code in codes if code not in (0, _NOT_FOUND)]:
            raise self._failure("remove", bad[0])
        return codes.count(0)

    def scan(self, prefix: bytes) -> Iterator[bytes]:  # noqa: ARG002
        """Refused: see the module."""
        raise StoreError(MoveFailure.ERROR, "a Mooncake store can't list its pages")

    def namespaces(self) -> list[Namespace]:
        """Refused: see the module."""
        raise StoreError(MoveFailure.ERROR, "a Mooncake store can't list its pages")

    def totals(self) -> tuple[int | None, int | None]:
        """See BlockingStore: unknown."""
        return None, None

    def maintain(self) -> None:
        """See BlockingStore: nothing."""

    def close(self) -> None:
        """See BlockingStore."""
        self._client.close()

    def _failure(self, call: str, code: int) -> StoreError:
        text = f"Mooncake's master at {self._master}: {call} failed with code {code}"
        return StoreError(MoveFailure.UNAVAILABLE, text)


def _options(parts: SplitResult) -> dict[str, str]:
    given = parse_qs(parts.query, keep_blank_values=True)
    unknown = sorted(set(given) - set(DEFAULTS))
    options = {**DEFAULTS, **{name: values[-1] for name, values in given.items()}}
    if unknown or not parts.hostname or parts.path.strip("/"):
        raise ConfigError(
            "a Mooncake URL is mooncake://MASTER:PORT?NAME=VALUE with any of "
            f"{', '.join(DEFAULTS)}, not {shown(without_password(parts.geturl()))}."
        )
    size = options["segment_bytes"]
    if not (size.isascii() and size.isdecimal() and len(size) < 19):
        raise ConfigError(f"segment_bytes is {shown(size)}, but must be a number of bytes.")
    return options


def _names(keys: Sequence[bytes]) -> list[str]:
    return [f"moestro:kv:2:{k[:DIGEST_BYTES].hex()}:{k[DIGEST_BYTES:].hex()}" for k in keys]
