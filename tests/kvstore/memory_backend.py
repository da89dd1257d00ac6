"""A BlockingStore in memory whose calls a test can hold up or let fail."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence

from moestro.core.page_store import StoreError
from moestro.kvstore.backend import Deadline, Namespace
from moestro.kvstore.codec import DIGEST_BYTES, Value, join, split


class MemoryBackend:
    """errors: raised by the next calls, one each. gate: while cleared, puts (hold_writes) or
    gets (hold_reads) are stuck, like a call that doesn't come back."""

    def __init__(self, values: dict[bytes, bytes] | None = None) -> None:
        self.values = {} if values is None else values
        self.errors: list[Exception] = []
        self.calls: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.hold_reads = self.hold_writes = True
        self.max_pages = 1 << 30
        self.num_closed = 0

    capacity_bytes = 0
    num_evicted = 0

    def _enter(self, name: str, held: bool) -> None:
        self.calls.append(name)
        if held:
            self.gate.wait(30)
        if self.errors:
            raise self.errors.pop(0)

    def get_many(self, keys: Sequence[bytes], deadline: Deadline) -> list[Value | None]:
        self._enter("get", self.hold_reads)
        found = [self.values.get(key) for key in keys]
        return [None if blob is None else split(blob) for blob in found]

    def put_many(self, values: Sequence[tuple[bytes, Value]], deadline: Deadline) -> int:
        self._enter("put", self.hold_writes)
        for i, (key, value) in enumerate(values):
            if key not in self.values and len(self.values) >= self.max_pages:
                return i
            self.values.setdefault(key, join(value))
        return len(values)

    def exists_many(self, keys: Sequence[bytes], deadline: Deadline) -> list[bool]:
        self._enter("exists", self.hold_reads)
        return [key in self.values for key in keys]

    def delete(self, keys: Sequence[bytes], deadline: Deadline) -> int:
        self._enter("delete", self.hold_writes)
        return sum(self.values.pop(key, None) is not None for key in keys)

    def scan(self, prefix: bytes) -> Iterator[bytes]:
        return iter([key for key in self.values if key.startswith(prefix)])

    def namespaces(self) -> list[Namespace]:
        num = Counter(key[:DIGEST_BYTES] for key in self.values)
        return [Namespace(digest, n, 0) for digest, n in num.items()]

    def totals(self) -> tuple[int | None, int | None]:
        return sum(map(len, self.values.values())), len(self.values)

    def maintain(self) -> None:
        self.calls.append("maintain")

    def close(self) -> None:
        self.num_closed += 1


def unavailable() -> StoreError:
    from moestro.core.page_moves import MoveFailure

    return StoreError(MoveFailure.UNAVAILABLE, "no answer")
