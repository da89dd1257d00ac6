"""The LMDB store beside plain files: put and get bandwidth.

    python bench/kvstore.py --folder FOLDER_ON_THE_DISK --pairs 4

In alternating pairs, the same pages: through open_store (codec, threads and all), and appended to
or read from one file by plain calls with the same syncs: after each batch fdatasync, and with
sync=always another synced write of one file page, as LMDB's second page of metadata is. A cold
read starts with the file out of the page cache. Prints medians and the median ratio of the pairs.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from moestro.core.page_moves import MoveFailure
from moestro.core.page_store import PageStore, Payload
from moestro.kvstore import open_store

BATCH_BYTES = 16 * 2**20
IN_FLIGHT = 2
FILE_PAGE = 4096


class Bench:
    """One size of page in a folder of its own."""

    def __init__(self, folder: Path, page_bytes: int, total_bytes: int) -> None:
        self.folder = folder
        self.page_bytes = page_bytes
        num_pages = max(1, total_bytes // page_bytes)
        source = np.random.default_rng(1).bytes(page_bytes + num_pages)
        self.keys = [i.to_bytes(16, "big") for i in range(num_pages)]
        self.pages = [memoryview(source)[i : i + page_bytes] for i in range(num_pages)]
        self.batch = max(1, BATCH_BYTES // page_bytes)
        self.num_bytes = num_pages * page_bytes

    @contextlib.contextmanager
    def store(self, sync: str) -> Iterator[PageStore]:
        url = f"lmdb://{self.folder / 'kv'}"
        capacity = 2 * self.num_bytes + 2**26
        made = open_store(
            url, digest=bytes(16), capacity_bytes=capacity, sync=sync, timeout_s=600.0
        )
        try:
            yield made
        finally:
            made.close(10.0)

    def batches(self) -> Iterator[range]:
        for begin in range(0, len(self.keys), self.batch):
            yield range(begin, min(begin + self.batch, len(self.keys)))

    def store_put(self, sync: str) -> float:
        shutil.rmtree(self.folder / "kv", ignore_errors=True)
        with self.store(sync) as store:
            start = time.perf_counter()
            futures = []
            for batch in self.batches():
                if len(futures) >= IN_FLIGHT:
                    futures[-IN_FLIGHT].result()
                futures.append(store.put_many([(self.keys[i], self.pages[i]) for i in batch]))
            assert sum(f.result() for f in futures) == len(self.keys)
            return self.num_bytes / (time.perf_counter() - start)

    def file_put(self, sync: str) -> float:
        (self.folder / "file").unlink(missing_ok=True)
        fd = os.open(self.folder / "file", os.O_RDWR | os.O_CREAT)
        meta = os.open(self.folder / "meta", os.O_RDWR | os.O_CREAT | os.O_DSYNC)
        start = time.perf_counter()
        for number, batch in enumerate(self.batches()):
            for i in batch:
                write_all(fd, self.pages[i])
            os.fdatasync(fd)
            if sync == "always":
                os.pwrite(meta, bytes(FILE_PAGE), number % 2 * FILE_PAGE)
        speed = self.num_bytes / (time.perf_counter() - start)
        os.close(fd)
        os.close(meta)
        return speed

    def store_get(self, cold: bool) -> float:
        if cold:
            forget(self.folder / "kv" / "data.mdb")
        with self.store("batch") as store:
            start = time.perf_counter()
            waiting: deque[Future[list[Payload | MoveFailure]]] = deque()
            for batch in self.batches():
                waiting.append(store.get_many([self.keys[i] for i in batch]))
                if len(waiting) == IN_FLIGHT:
                    self.check(waiting.popleft().result())
            while waiting:
                self.check(waiting.popleft().result())
            return self.num_bytes / (time.perf_counter() - start)

    def file_get(self, cold: bool) -> float:
        if cold:
            forget(self.folder / "file")
        with open(self.folder / "file", "rb", buffering=0) as file:
            start = time.perf_counter()
            for batch in self.batches():
                block = np.empty((len(batch), self.page_bytes), np.uint8)
                for page in block:
                    assert file.readinto(page.data) == self.page_bytes
            return self.num_bytes / (time.perf_counter() - start)

    def check(self, found: "Sequence[Payload | MoveFailure]") -> None:
        assert all(memoryview(p).nbytes == self.page_bytes for p in found)  # type: ignore[arg-type]


def write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def forget(path: Path) -> None:
    """Out of the page cache; nobody may have it mapped."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def pairs(
    ours: Callable[[], float], plain: Callable[[], float], num: int
) -> tuple[float, float, float]:
    """Median bytes/s of both, and the median ratio; who goes first changes from pair to pair."""
    measured = []
    for i in range(num):
        first, second = (ours(), plain()) if i % 2 == 0 else (plain(), ours())
        measured.append((first, second) if i % 2 == 0 else (second, first))
    a, b = zip(*measured, strict=True)
    return statistics.median(a), statistics.median(b), statistics.median(map(ratio, measured))


def ratio(pair: Sequence[float]) -> float:
    return pair[0] / pair[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--page-bytes", default="163840,2097152,6291456")
    parser.add_argument("--mb", type=int, default=256, help="written and read in one measurement")
    parser.add_argument("--pairs", type=int, default=4)
    args = parser.parse_args()
    out = sys.stdout.write
    out(f"{'page':>9} {'what':<12} {'store GB/s':>10} {'file GB/s':>10} {'ratio':>6}\n")
    for page_bytes in map(int, args.page_bytes.split(",")):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            bench = Bench(Path(folder), page_bytes, args.mb * 10**6)
            for what, ours, plain in (
                ("put always", lambda b: b.store_put("always"), lambda b: b.file_put("always")),
                ("put batch", lambda b: b.store_put("batch"), lambda b: b.file_put("batch")),
                ("get cold", lambda b: b.store_get(True), lambda b: b.file_get(True)),
                ("get warm", lambda b: b.store_get(False), lambda b: b.file_get(False)),
            ):
                run = [lambda f=f, b=bench: f(b) for f in (ours, plain)]  # type: ignore[misc]
                store, file, share = pairs(run[0], run[1], args.pairs)
                out(f"{page_bytes:>9} {what:<12} {store / 1e9:>10.3f} {file / 1e9:>10.3f} ")
                out(f"{share:>6.2f}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
