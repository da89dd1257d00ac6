"""Pages in an LMDB environment: the store that needs no server and survives restarts.

Tables, all changed in the same transaction:
    pages   key -> payload
    index   key -> use, payload bytes, place, layout, seal: all but the payload. place: its first
            file page while the file's layout is that one (data_file.py), 0 if it has none
    uses    use (big-endian) -> key                least recently used first
    totals  digest -> pages, payload bytes, footprint bytes; "all" -> the same over all
    meta    format; layout; next_use, a counter that stands for time: clocks jump

The footprint is what a payload takes in the file: whole file pages. The file can't outgrow
capacity_bytes (the size of its map). Above the high water mark a put first evicts down to the low
one; where free pages are too scattered for one (or the disk is full), it evicts more and tries
again, and gives up after a few times.
"""

import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moestro.core.page_moves import MoveFailure
from moestro.core.page_store import StoreError
from moestro.kvstore import lmdb_environment
from moestro.kvstore.backend import Deadline, Namespace
from moestro.kvstore.blocks import Blocks
from moestro.kvstore.codec import DIGEST_BYTES, SEAL_BYTES, Value, checksum_of
from moestro.kvstore.data_file import PAGE_HEADER_BYTES

MIN_CAPACITY_BYTES = 2**20
HIGH_WATER, LOW_WATER = 0.85, 0.80
MAX_TRIES = 6
MAX_TOUCHED = 65536
SCAN_KEYS = 1024
UPKEEP_S = 1.0
KEEP_BYTES = 2**25 - 2**16
_INDEX = struct.Struct("<QQQQ")
_USE = struct.Struct(">Q")
_TOTALS = struct.Struct("<QQQ")
_ALL = b"all"


class LmdbStore:
    """A BlockingStore; several processes and engines may have the same folder open.

    sync: always (each put is on the disk when it returns) or batch (every few seconds; after a
    power loss the last puts may be gone, never torn).
    Raises StoreError when the folder can't be used.
    """

    def __init__(self, folder: Path, capacity_bytes: int, sync: str, deadline: Deadline) -> None:
        self._env = lmdb_environment.shared(folder, capacity_bytes, sync, deadline)
        self._blocks = Blocks()
        self._touched: dict[bytes, None] = {}
        self._touching = threading.Lock()
        self._is_dirty = False
        self.num_evicted = 0
        _keep_freed_memory()
        try:
            with self._env.reading(deadline) as txn:
                self._totals = self._read_totals(txn, _ALL)
        except BaseException:
            lmdb_environment.release(self._env)
            raise

    @property
    def capacity_bytes(self) -> int:
        """See BlockingStore."""
        return self._env.capacity_bytes

    def get_many(self, keys: Sequence[bytes], deadline: Deadline) -> list[Value | None]:
        """See BlockingStore."""
        found: list[Value | None] = []
        with self._env.reading(deadline) as txn:
            records = [txn.get(key, db=self._env.tables[b"index"]) for key in keys]
            layout = self._layout(txn)
            sizes = [0 if record is None else _INDEX.unpack_from(record)[1] for record in records]
            free = self._blocks.lend(sum(sizes))
            for key, record, size in zip(keys, records, sizes, strict=True):
                out, free = free[:size], free[size:]
                found.append(record and self._read(txn, key, record, layout, out))
                deadline.check()
        self._touch([key for key, value in zip(keys, found, strict=True) if value is not None])
        return found

    def _read(
        self, txn: Any, key: bytes, record: memoryview, layout: int, out: memoryview
    ) -> Value | None:
        """The page with this record, its payload in `out`; None when there is none."""
        _, size, place, of_layout = _INDEX.unpack_from(record)
        seal = bytes(record[_INDEX.size :])
        if place and of_layout == layout and self._env.file.read(place, out):
            return Value(seal, out, checksum_of(seal, out))
        view = txn.get(key, db=self._env.tables[b"pages"])
        if view is None or view.nbytes != size:
            return None
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(view, np.uint8))
        return Value(seal, out)

    def _layout(self, txn: Any) -> int:
        """Counts the compactions: places that were noted before the last one are gone."""
        return int(_USE.unpack(txn.get(b"layout", _USE.pack(0), db=self._env.tables[b"meta"]))[0])

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Note a use, to be written with the next transaction. The first of a run counts as used
        last: what continues it is of no use without it."""
        with self._touching:
            if len(self._touched) < MAX_TOUCHED:
                self._touched.update(dict.fromkeys(reversed(keys)))

    def exists_many(self, keys: Sequence[bytes], deadline: Deadline) -> list[bool]:
        """See BlockingStore."""
        with self._env.reading(deadline) as txn:
            return [txn.get(key, db=self._env.tables[b"index"]) is not None for key in keys]

    def put_many(self, values: Sequence[tuple[bytes, Value]], deadline: Deadline) -> int:
        """See BlockingStore. A value larger than the low water mark never fits."""
        fitting = list(values)
        for i, (_, value) in enumerate(values):
            if self._footprint(memoryview(value.payload).nbytes) > LOW_WATER * self.capacity_bytes:
                del fitting[i:]
                break
        num_stored, num_tried, step = 0, 0, max(1, len(fitting))
        while num_stored < len(fitting):
            batch = fitting[num_stored : num_stored + step]
            try:
                self._put_batch(batch, deadline)
            except StoreError as error:
                num_tried += 1
                if error.failure is not MoveFailure.FULL:
                    raise
                if num_tried == MAX_TRIES:
                    if num_stored:
                        break
                    raise
                sizes = [self._footprint(memoryview(v.payload).nbytes) for _, v in batch]
                self._make_room(num_tried * sum(sizes), deadline)
                step = max(1, step // 2)
            else:
                num_stored += len(batch)
        return num_stored

    def _put_batch(self, batch: Sequence[tuple[bytes, Value]], deadline: Deadline) -> None:
        with self._env.writing(deadline) as txn:
            self._write_touched(txn)
            index, pages = self._env.tables[b"index"], self._env.tables[b"pages"]
            present = [key for key, _ in batch if txn.get(key, db=index) is not None]
            self._write_uses(txn, present[::-1])
            known = set(present)
            absent = {key: value for key, value in batch if key not in known}
            sizes = {key: memoryview(v.payload).nbytes for key, v in absent.items()}
            needed = sum(map(self._footprint, sizes.values()))
            total, num_evicted = self._read_totals(txn, _ALL), 0
            if total[2] + needed > HIGH_WATER * self.capacity_bytes:
                num_evicted = self._evict(
                    txn, total[2] + needed - int(LOW_WATER * self.capacity_bytes)
                )
            first_use, layout = self._take_uses(txn, len(absent)), self._layout(txn)
            # The first of a run counts as used last, and lies first in the file: runs are read so.
            for use, (key, value) in zip(
                range(first_use + len(absent) - 1, first_use - 1, -1), absent.items(), strict=True
            ):
                txn.put(key, value.payload, db=pages)
                place = self._env.file.place_of(txn.get(key, db=pages))
                record = _INDEX.pack(use, sizes[key], place, layout) + value.seal
                txn.put(key, record, db=index)
                txn.put(_USE.pack(use), key, db=self._env.tables[b"uses"])
            self._count(txn, sizes, 1)
            totals = self._read_totals(txn, _ALL)
            deadline.check()
        self._totals, self._is_dirty = totals, True
        self.num_evicted += num_evicted

    def _make_room(self, num_bytes: int, deadline: Deadline) -> None:
        with self._env.writing(deadline) as txn:
            num_evicted = self._evict(txn, num_bytes)
        self.num_evicted += num_evicted
        # LMDB reuses the pages that one transaction frees only in the second one after it.
        with self._env.writing(deadline) as txn:
            self._take_uses(txn, 1)

    def _evict(self, txn: Any, num_bytes: int) -> int:
        """Delete what was used longest ago, until so many bytes are free; how many pages."""
        victims = []
        cursor = txn.cursor(db=self._env.tables[b"uses"])
        for _, key in cursor:
            if num_bytes <= 0:
                break
            victims.append(bytes(key))
            record = txn.get(key, db=self._env.tables[b"index"])
            if record is not None:
                num_bytes -= self._footprint(_INDEX.unpack_from(record)[1])
        cursor.close()
        return self._delete_each(txn, victims)

    def delete(self, keys: Sequence[bytes], deadline: Deadline) -> int:
        """See BlockingStore."""
        with self._env.writing(deadline) as txn:
            num_deleted = self._delete_each(txn, keys)
            totals = self._read_totals(txn, _ALL)
        self._totals, self._is_dirty = totals, True
        return num_deleted

    def shrink(self, num_bytes: int, deadline: Deadline) -> int:
        """Evict until the footprints sum up to at most so much; how many pages went."""
        with self._env.writing(deadline) as txn:
            self._write_touched(txn)
            excess = self._read_totals(txn, _ALL)[2] - num_bytes
            return self._evict(txn, excess)

    def _delete_each(self, txn: Any, keys: Sequence[bytes]) -> int:
        sizes: dict[bytes, int] = {}
        for key in keys:
            record = txn.get(key, db=self._env.tables[b"index"])
            if record is not None:
                use, sizes[key], *_ = _INDEX.unpack_from(record)
                txn.delete(key, db=self._env.tables[b"index"])
                txn.delete(_USE.pack(use), db=self._env.tables[b"uses"])
                txn.delete(key, db=self._env.tables[b"pages"])
        self._count(txn, sizes, -1)
        return len(sizes)

    def _count(self, txn: Any, sizes: Mapping[bytes, int], sign: int) -> None:
        """Add values of so many bytes to the totals, or with sign -1 take them off."""
        changes: dict[bytes, list[int]] = {}
        for key, value_bytes in sizes.items():
            for name in (key[:DIGEST_BYTES], _ALL):
                change = changes.setdefault(name, [0, 0, 0])
                change[0] += sign
                change[1] += sign * value_bytes
                change[2] += sign * self._footprint(value_bytes)
        for name, change in changes.items():
            new = [a + b for a, b in zip(self._read_totals(txn, name), change, strict=True)]
            if new[0]:
                txn.put(name, _TOTALS.pack(*new), db=self._env.tables[b"totals"])
            else:
                txn.delete(name, db=self._env.tables[b"totals"])

    def _read_totals(self, txn: Any, name: bytes) -> tuple[int, ...]:
        record = txn.get(name, db=self._env.tables[b"totals"])
        return (0, 0, 0) if record is None else _TOTALS.unpack(record)

    def _write_touched(self, txn: Any) -> None:
        with self._touching:
            touched, self._touched = self._touched, {}
        self._write_uses(txn, list(touched))

    def _write_uses(self, txn: Any, keys: Sequence[bytes]) -> None:
        """The keys that are there become the most recently used ones, the last the most."""
        if not keys:
            return
        index, uses = self._env.tables[b"index"], self._env.tables[b"uses"]
        use = self._take_uses(txn, len(keys))
        for key in keys:
            record = txn.get(key, db=index)
            if record is not None:
                old, *rest = _INDEX.unpack_from(record)
                seal = bytes(record[_INDEX.size :])
                txn.delete(_USE.pack(old), db=uses)
                txn.put(_USE.pack(use), key, db=uses)
                txn.put(key, _INDEX.pack(use, *rest) + seal, db=index)
            use += 1

    def _take_uses(self, txn: Any, num: int) -> int:
        """The first of so many unused values of the counter."""
        meta = self._env.tables[b"meta"]
        first = _USE.unpack(txn.get(b"next_use", _USE.pack(0), db=meta))[0]
        txn.put(b"next_use", _USE.pack(first + num), db=meta)
        return int(first)

    def _footprint(self, value_bytes: int) -> int:
        return -(-(value_bytes + PAGE_HEADER_BYTES) // self._env.page_bytes) * self._env.page_bytes

    def scan(self, prefix: bytes) -> Iterator[bytes]:
        """See BlockingStore. No snapshot is kept between keys: it would keep deleted pages."""
        start: bytes | None = prefix
        while start is not None:
            keys: list[bytes] = []
            with self._env.reading(Deadline(10.0)) as txn:
                cursor = txn.cursor(db=self._env.tables[b"index"])
                if cursor.set_range(start):
                    for key in cursor.iternext(values=False):
                        if not bytes(key).startswith(prefix) or len(keys) == SCAN_KEYS:
                            break
                        keys.append(bytes(key))
                cursor.close()
            yield from keys
            start = keys[-1] + b"\0" if len(keys) == SCAN_KEYS else None

    def namespaces(self) -> list[Namespace]:
        """See BlockingStore."""
        with self._env.reading(Deadline(10.0)) as txn:
            rows = [
                (bytes(k), _TOTALS.unpack(v)) for k, v in txn.cursor(self._env.tables[b"totals"])
            ]
        return [
            Namespace(key, n, size + n * SEAL_BYTES)
            for key, (n, size, _) in rows
            if len(key) == DIGEST_BYTES
        ]

    def totals(self) -> tuple[int | None, int | None]:
        """See BlockingStore. Bytes are footprints."""
        num_pages, _, footprint = self._totals
        return footprint, num_pages

    def maintain(self) -> None:
        """See BlockingStore."""
        deadline = Deadline(UPKEEP_S)
        self._env.check_in_place()
        if self._touched:
            with self._env.writing(deadline) as txn:
                self._write_touched(txn)
            self._is_dirty = True
        with self._env.reading(deadline) as txn:
            self._totals = self._read_totals(txn, _ALL)
        self._env.clear_dead_readers()
        if self._is_dirty and self._env.sync == "batch":
            self._is_dirty = False
            self._env.flush()

    def compact(self, deadline: Deadline) -> bool:
        """Give free pages back to the file system; False when other processes use the store."""
        with self._env.writing(deadline) as txn:
            meta = self._env.tables[b"meta"]
            txn.put(b"layout", _USE.pack(self._layout(txn) + 1), db=meta)
        return self._env.compact(deadline)

    def file_bytes(self) -> int:
        """Bytes of the data file that are or were in use."""
        return self._env.info()["file_bytes"]

    def close(self) -> None:
        """See BlockingStore."""
        lmdb_environment.release(self._env)


def _keep_freed_memory() -> None:
    """LMDB collects a transaction in memory that it takes and frees each time. The GNU C library
    gives freed memory of such sizes back to the system, which then hands it out page by page
    again: for 16 MB of pages of 160 KiB 10 ms, instead of 2 in memory that stays. It keeps as much
    as twice the largest block that was freed so far, up to 32 MiB: so free one of that size.
    """
    np.empty(KEEP_BYTES, np.uint8)
