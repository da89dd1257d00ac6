"""ThreadedStore: a PageStore over any BlockingStore.

Here, once for all backends: futures that are done within the timeout whatever the backend does,
lanes of their own for reads and writes (a writer that is stuck blocks no reader), a circuit
breaker a lane, queues that refuse rather than grow, the codec, and the quarantine.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from moestro.core.page_moves import MoveFailure
from moestro.core.page_store import Payload, StoreError, StoreUsage
from moestro.kvstore import codec
from moestro.kvstore.backend import BlockingStore, Deadline
from moestro.kvstore.breaker import SEVERITY, CircuitBreaker
from moestro.kvstore.lane import Lane

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 256 * 2**20
MAX_CLOSE_S = 10.0
MAX_QUARANTINED = 65536
MAX_WARNINGS = 20
MAINTAIN_EVERY_S = 2.0
# A store may copy what it writes at once; together the copies stay below this.
GROUP_BYTES = 32 * 2**20


class ThreadedStore:
    """The pages of one namespace in one backend; owns the backend and closes it.

    digest: 16 bytes. max_pending_bytes: of payloads that wait to be written.
    """

    def __init__(
        self,
        backend: BlockingStore,
        digest: bytes,
        *,
        timeout_s: float,
        name: str = "kv",
        max_pending_bytes: int = MAX_PENDING_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if len(digest) != codec.DIGEST_BYTES:
            raise ValueError(f"a namespace digest has {codec.DIGEST_BYTES} bytes, not {digest!r}")
        self._backend = backend
        self._digest = digest
        self._lock = threading.Lock()
        self._quarantine: OrderedDict[bytes, None] = OrderedDict()
        self._num_quarantined = 0
        self._is_closed = False
        self._reads = Lane(
            f"{name} read",
            CircuitBreaker(clock),
            timeout_s=timeout_s,
            max_bytes=max_pending_bytes,
            upkeep=lambda: None,
            upkeep_s=3600.0,
        )
        self._writes = Lane(
            f"{name} write",
            CircuitBreaker(clock),
            timeout_s=timeout_s,
            max_bytes=max_pending_bytes,
            upkeep=backend.maintain,
            upkeep_s=MAINTAIN_EVERY_S,
            gives_way=True,
        )

    def get_many(self, keys: Sequence[bytes]) -> "Future[list[Payload | MoveFailure]]":
        """See PageStore."""
        wanted = tuple(keys)
        return self._reads.submit(lambda deadline: self._get(wanted, deadline))

    def put_many(self, pages: Sequence[tuple[bytes, Payload]]) -> "Future[int]":
        """See PageStore. A count short of all: no room for the rest, even after eviction."""
        listed = tuple(pages)
        num_bytes = sum(memoryview(payload).nbytes for _, payload in listed)
        return self._writes.submit(lambda deadline: self._put(listed, deadline), num_bytes)

    def exists_many(self, keys: Sequence[bytes]) -> "Future[list[bool]]":
        """See PageStore."""
        wanted = tuple(keys)
        return self._reads.submit(lambda deadline: self._exist(wanted, deadline))

    def delete(self, keys: Sequence[bytes]) -> "Future[int]":
        """See PageStore."""
        wanted = [self._digest + key for key in keys]
        return self._writes.submit(lambda deadline: self._backend.delete(wanted, deadline))

    def scan(self) -> Iterator[bytes]:
        """See PageStore."""
        for key in self._backend.scan(self._digest):
            yield key[codec.DIGEST_BYTES :]

    def usage(self) -> StoreUsage:
        """As of the last call that was answered; never waits."""
        num_bytes, num_pages = self._backend.totals()
        states = (self._reads.breaker_state, self._writes.breaker_state)
        worst = max(states, key=SEVERITY.index)
        capacity = self._backend.capacity_bytes
        return StoreUsage(
            num_bytes, num_pages, capacity, worst, self._num_quarantined, self._backend.num_evicted
        )

    def close(self, timeout_s: float) -> None:
        """See PageStore; never longer than 10 s."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        deadline = Deadline(min(timeout_s, MAX_CLOSE_S))
        reads_ended = self._reads.close(min(deadline.remaining_s, 1.0), lambda: None)

        def end() -> None:
            try:
                self._backend.maintain()
            finally:
                if reads_ended:  # else the backend is still in use: the process's end closes it
                    self._backend.close()

        if not self._writes.close(deadline.remaining_s, end):
            logger.warning("pages were not written: the store did not take them in time")

    def _get(self, keys: Sequence[bytes], deadline: Deadline) -> list[Payload | MoveFailure]:
        asked = [key for key in keys if key not in self._quarantine]
        values = self._backend.get_many([self._digest + key for key in asked], deadline)
        found = dict(zip(asked, values, strict=True))
        return [self._checked(key, found.get(key)) for key in keys]

    def _checked(self, key: bytes, value: codec.Value | None) -> Payload | MoveFailure:
        if value is None:
            return MoveFailure.MISSING
        try:
            return codec.unseal(value, self._digest, key)
        except codec.CorruptValueError as error:
            level = logging.WARNING if self._num_quarantined < MAX_WARNINGS else logging.DEBUG
            logger.log(level, "page %s: %s; it will be computed again", key.hex(), error)
            self._quarantine_page(key)
            return MoveFailure.CORRUPT

    def _quarantine_page(self, key: bytes) -> None:
        """From now on a miss, here; and gone for everybody once the deletion is through."""
        with self._lock:
            self._num_quarantined += 1
            self._quarantine[key] = None
            if len(self._quarantine) > MAX_QUARANTINED:
                self._quarantine.popitem(last=False)

        def remove(deadline: Deadline) -> None:
            self._backend.delete([self._digest + key], deadline)
            with self._lock:
                self._quarantine.pop(key, None)

        self._writes.submit(remove)

    def _put(self, pages: Sequence[tuple[bytes, Payload]], deadline: Deadline) -> int:
        bad = [self._digest + key for key, _ in pages if key in self._quarantine]
        if bad:
            self._backend.delete(bad, deadline)
            with self._lock:
                for key in bad:
                    self._quarantine.pop(key[codec.DIGEST_BYTES :], None)
        num_stored = 0
        for group in _groups(pages):
            values = [
                (self._digest + key, codec.seal(self._digest, key, payload))
                for key, payload in group
            ]
            deadline.check()  # the payloads may have changed since: what was sealed is worthless
            num_taken = self._backend.put_many(values, deadline)
            num_stored += num_taken
            if num_taken < len(group):
                break
        if pages and not num_stored:
            raise StoreError(MoveFailure.FULL, "the store has no room, even after eviction")
        return num_stored

    def _exist(self, keys: Sequence[bytes], deadline: Deadline) -> list[bool]:
        # Looked at first: a deletion that is under way may end between the two.
        asked = [key for key in keys if key not in self._quarantine]
        found = self._backend.exists_many([self._digest + key for key in asked], deadline)
        there = {key for key, is_there in zip(asked, found, strict=True) if is_there}
        return [key in there for key in keys]


def _groups(
    pages: Sequence[tuple[bytes, Payload]],
) -> Iterator[Sequence[tuple[bytes, Payload]]]:
    """Runs of pages that fit GROUP_BYTES; at least one page each."""
    begin, num_bytes = 0, 0
    for i, (_, payload) in enumerate(pages):
        size = memoryview(payload).nbytes
        if i > begin and num_bytes + size > GROUP_BYTES:
            yield pages[begin:i]
            begin, num_bytes = i, 0
        num_bytes += size
    if begin < len(pages):
        yield pages[begin:]
