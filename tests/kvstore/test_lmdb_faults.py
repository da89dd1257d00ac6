"""LMDB stores that are killed, damaged, full, read-only, of another version, or held by a writer
that was stopped: never a wrong page, a crash or a hang."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import lmdb
import pytest
from tests.kvstore.small_disk import small_disk

from moestro.core.page_moves import MoveFailure
from moestro.core.page_store import StoreError
from moestro.kvstore import codec, lmdb_environment, open_store
from moestro.kvstore.backend import Deadline
from moestro.kvstore.lmdb_store import LmdbStore

CAPACITY = 4 * 2**20
DIGEST = bytes(16)
TIMEOUT_S = 0.5


def rounds_of(what: str, folder: Path, rounds: int) -> Counter[str]:
    """lmdb_rounds in a process of its own, without this one's threads."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.kvstore.lmdb_rounds", what, str(folder), str(rounds)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Counter(json.loads(found.stdout))


def soon() -> Deadline:
    return Deadline(10)


def key(i: int) -> bytes:
    return DIGEST + i.to_bytes(16, "big")


def page(i: int) -> bytes:
    return random.Random(i).randbytes(50_000)


def value(i: int) -> codec.Value:
    return codec.seal(DIGEST, key(i)[16:], page(i))


def payloads(found: Sequence[codec.Value | None]) -> list[object]:
    return [None if one is None else one.payload for one in found]


def filled(folder: Path, num: int = 10) -> None:
    """A store that was closed with so many pages in it."""
    store = open_store(f"lmdb://{folder}", digest=DIGEST, capacity_bytes=CAPACITY)
    assert store.put_many([(key(i)[16:], page(i)) for i in range(num)]).result(20) == num
    store.close(10)


def refusal(folder: Path, timeout_s: float = 10.0) -> StoreError:
    with pytest.raises(StoreError) as caught:
        LmdbStore(folder, CAPACITY, "batch", Deadline(timeout_s))
    assert str(folder) in str(caught.value)
    assert not lmdb_environment._open_environments
    return caught.value


@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_while_writing(tmp_path: Path, rounds: int) -> None:
    seen = rounds_of("kill", tmp_path, rounds)
    assert seen.pop("killed") == rounds
    assert seen.pop("right") > rounds
    assert seen == {}


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_two_processes_write_the_same_pages(tmp_path: Path, rounds: int) -> None:
    seen = rounds_of("race", tmp_path / "store", rounds)
    assert seen.pop("right") == 80 * rounds
    assert not +seen


@pytest.mark.parametrize("rounds", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_flipped_bits_anywhere_in_the_file(tmp_path: Path, rounds: int) -> None:
    seen = rounds_of("flip", tmp_path, rounds)
    assert seen.pop("flipped") == rounds
    assert seen.pop("right") > rounds
    assert seen.pop("corrupt") > 0
    assert set(seen) <= {"refused as corrupt", "refused as error", "tables disagree"}


@pytest.mark.parametrize("rounds", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_flipped_bit_of_a_page_is_a_counted_miss(tmp_path: Path, rounds: int) -> None:
    num_pages, chance = 10, random.Random(6)
    filled(tmp_path, num_pages)
    data = (tmp_path / "data.mdb").read_bytes()
    keys = [key(i)[16:] for i in range(num_pages)]
    for _ in range(rounds):
        target = chance.randrange(num_pages)
        value = codec.seal(DIGEST, keys[target], page(target))
        part = value.seal if chance.randrange(4) == 0 else page(target)
        assert data.count(part) == 1
        at = data.index(part) + chance.randrange(len(part))
        flipped = bytearray(data)
        flipped[at] ^= 1 << chance.randrange(8)
        (tmp_path / "data.mdb").write_bytes(flipped)
        store = open_store(f"lmdb://{tmp_path}", digest=DIGEST, capacity_bytes=CAPACITY)
        found = store.get_many(keys).result(20)
        assert found[target] is MoveFailure.CORRUPT
        assert [p == page(i) for i, p in enumerate(found) if i != target] == [True] * 9
        assert store.get_many([keys[target]]).result(20) == [MoveFailure.MISSING]
        assert store.usage().num_quarantined == 1
        store.close(10)


@pytest.mark.parametrize(
    "damage",
    ["empty pages", "random", "text", "cut at a third", "cut by a page", "random in the middle"],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    filled(tmp_path)
    path = tmp_path / "data.mdb"
    data = path.read_bytes()
    noise = random.Random(7).randbytes(len(data))
    path.write_bytes(
        {
            "empty pages": bytes(len(data)),
            "random": noise,
            "text": b"not a database\n" * 1000,
            "cut at a third": data[: len(data) // 3],
            "cut by a page": data[:-4096],
            "random in the middle": data[:8192] + noise[8192:-8192] + data[-8192:],
        }[damage]
    )
    error = refusal(tmp_path)
    assert error.failure is MoveFailure.CORRUPT
    assert "delete the folder" in str(error)


def test_an_empty_file_is_a_new_store(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").touch()
    filled(tmp_path)


def test_another_version_of_the_format(tmp_path: Path) -> None:
    filled(tmp_path)
    with lmdb.open(str(tmp_path), max_dbs=8) as env, env.begin(write=True) as txn:
        txn.put(b"format", b"moestro kv 1", db=env.open_db(b"meta", txn=txn))
    assert "moestro kv 1" in str(refusal(tmp_path))


def test_another_version_of_lmdb(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path), lib_version=1) as env, env.begin(write=True) as txn:
        txn.put(b"k", b"v")
    assert refusal(tmp_path).failure is MoveFailure.ERROR


def test_somebody_elses_environment(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path)) as env, env.begin(write=True) as txn:
        txn.put(b"k", b"v")
    assert "no KV store of Moestro" in str(refusal(tmp_path))
    with lmdb.open(str(tmp_path)) as env, env.begin() as txn:
        assert txn.get(b"k") == b"v"


def test_a_budget_below_what_is_there(tmp_path: Path) -> None:
    filled(tmp_path, 60)
    with pytest.raises(StoreError, match="moestro kv gc") as caught:
        LmdbStore(tmp_path, 2**20, "batch", soon())
    assert caught.value.failure is MoveFailure.FULL


def test_folders_that_can_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/moestro")):
        assert refusal(folder).failure is MoveFailure.UNAVAILABLE


def test_a_full_disk(tmp_path: Path) -> None:
    """The store goes on within what the disk had: pages are refused or take older ones' place."""
    with small_disk(tmp_path / "disk", "size=2m"):
        store = LmdbStore(tmp_path / "disk" / "kv", 64 * 2**20, "batch", soon())
        outcomes = []
        for i in range(100):
            try:
                outcomes.append(store.put_many([(key(i), value(i))], soon()))
            except StoreError as error:
                outcomes.append(error.failure)
        assert set(outcomes) <= {1, MoveFailure.FULL}
        assert outcomes[:20] == [1] * 20
        (last,) = payloads(store.get_many([key(19)], soon()))
        there = payloads(store.get_many([key(i) for i in range(100)], soon()))
        assert last == page(19) or outcomes.count(1) > 20
        assert all(one in (None, page(i)) for i, one in enumerate(there))
        assert sum(one is not None for one in there) > 10
        store.close()
        LmdbStore(tmp_path / "disk" / "kv", 64 * 2**20, "batch", soon()).close()


def test_a_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    """Somebody else fills it and makes room again: pages that were there stay, new ones follow."""
    with small_disk(tmp_path / "disk", "size=4m"):
        store = open_store(
            f"lmdb://{tmp_path}/disk/kv", digest=DIGEST, capacity_bytes=64 * 2**20, timeout_s=5.0
        )
        pages = [(key(i)[16:], page(i)) for i in range(60)]
        assert store.put_many(pages[:10]).result(20) == 10
        other = tmp_path / "disk" / "other"
        with contextlib.suppress(OSError), other.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with contextlib.suppress(StoreError):
            assert store.put_many(pages[10:40]).result(20) < 30
        found = store.get_many([k for k, _ in pages[:40]]).result(20)
        assert all(
            one in (MoveFailure.MISSING, data)
            for one, (_, data) in zip(found, pages[:40], strict=True)
        )
        other.unlink()
        assert store.put_many(pages[40:]).result(20) == 20
        assert store.get_many([k for k, _ in pages[40:]]).result(20) == [p for _, p in pages[40:]]
        assert store.usage().num_quarantined == 0
        store.close(10)


@pytest.mark.parametrize("what", ["folder", "file", "replaced"])
def test_a_store_that_is_deleted_while_it_runs(tmp_path: Path, what: str) -> None:
    """It is used no more and says so; beside it no other process makes one with its lock file."""
    folder = tmp_path / "kv"
    filled(folder)
    store = LmdbStore(folder, CAPACITY, "batch", soon())
    if what == "folder":
        shutil.rmtree(folder)
    else:
        (folder / "data.mdb").unlink()
    if what == "file":
        program = f"""
from pathlib import Path
from moestro.kvstore.backend import Deadline
from moestro.kvstore.lmdb_store import LmdbStore
LmdbStore(Path({str(folder)!r}), {CAPACITY}, "batch", Deadline(10))
"""
        run = [sys.executable, "-c", program]
        found = subprocess.run(run, capture_output=True, text=True, check=False)
        assert "was deleted while other processes have it open" in found.stderr
    if what == "replaced":
        (folder / "data.mdb").write_bytes(b"another")
    for call in (
        store.maintain,
        lambda: store.put_many([(key(50), value(50))], soon()),
        lambda: store.get_many([key(1)], soon()),
    ):
        with pytest.raises(StoreError, match="deleted or replaced while in use") as caught:
            call()
        assert caught.value.failure is MoveFailure.UNAVAILABLE
    store.close()
    if what != "replaced":
        filled(folder)


FILE_LIMIT = """
import resource, sys
from pathlib import Path
from moestro.core.page_store import StoreError
from moestro.kvstore.backend import Deadline
from moestro.kvstore.codec import Value
from moestro.kvstore.lmdb_store import LmdbStore
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
store = LmdbStore(Path(sys.argv[1]), 2**26, "always", Deadline(10))
outcomes = []
for i in range(60):
    try:
        value = Value(bytes(64), bytes([i]) * 50000)
        outcomes.append(store.put_many([(bytes(31) + bytes([i]), value)], Deadline(10)))
    except StoreError as error:
        outcomes.append(str(error.failure))
found = store.get_many([bytes(31) + bytes([i]) for i in range(60)], Deadline(10))
assert all(v is None or v.payload == bytes([i]) * 50000 for i, v in enumerate(found))
assert sum(v is not None for v in found) > 5
assert outcomes[:10] == [1] * 10 and set(outcomes) <= {1, "full"}, outcomes
print("survived")
"""


def test_a_quota_on_the_file(tmp_path: Path) -> None:
    program = [sys.executable, "-c", FILE_LIMIT, str(tmp_path / "kv")]
    found = subprocess.run(program, capture_output=True, text=True, check=False)
    assert found.stdout == "survived\n", found.stderr


def test_a_read_only_file_system(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "size=8m"):
        filled(disk / "kv")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        error = refusal(disk / "kv")
        assert error.failure is MoveFailure.UNAVAILABLE
        assert "writable" in str(error)


HOLDER = """
import os, signal, sys
from pathlib import Path
from moestro.kvstore.backend import Deadline
from moestro.kvstore.lmdb_store import LmdbStore
store = LmdbStore(Path(sys.argv[1]), int(sys.argv[2]), "batch", Deadline(10))
how = sys.argv[3]
with (store._env.writing if how == "writer" else store._env.reading)(Deadline(10)) as txn:
    if how == "writer":
        txn.put(b"never committed", b"", db=store._env.tables[b"meta"])
    print("held", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
store.close()
"""


@contextlib.contextmanager
def holder(folder: Path, how: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that was stopped in the middle of a transaction."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), str(CAPACITY), how],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        os.waitpid(process.pid, os.WUNTRACED)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("ending", [signal.SIGCONT, signal.SIGKILL])
def test_a_stopped_writer_costs_the_timeout(tmp_path: Path, ending: signal.Signals) -> None:
    filled(tmp_path)
    url = f"lmdb://{tmp_path}"
    store = open_store(url, digest=DIGEST, capacity_bytes=CAPACITY, timeout_s=TIMEOUT_S)
    with holder(tmp_path, "writer") as process:
        start = time.monotonic()
        put = store.put_many([(key(90)[16:], page(90))])
        assert store.get_many([key(1)[16:]]).result(TIMEOUT_S + 1) == [page(1)]
        error = put.exception(TIMEOUT_S + 1)
        assert isinstance(error, StoreError)
        assert error.failure is MoveFailure.TIMEOUT
        assert time.monotonic() - start < TIMEOUT_S + 1
        process.send_signal(ending)
        process.wait()
    assert store.put_many([(key(90)[16:], page(90))]).result(20) == 1
    assert store.get_many([key(90)[16:]]).result(20) == [page(90)]
    store.close(10)


def test_opening_beside_a_stopped_writer(tmp_path: Path) -> None:
    filled(tmp_path)
    with holder(tmp_path, "writer"):
        assert refusal(tmp_path, TIMEOUT_S).failure is MoveFailure.TIMEOUT
    filled(tmp_path)


def test_a_stopped_reader_keeps_its_pages_and_nothing_grows(tmp_path: Path) -> None:
    """Its snapshot keeps every page of then in the file: puts are refused until it is gone."""
    filled(tmp_path, 60)
    store = LmdbStore(tmp_path, CAPACITY, "batch", soon())
    with holder(tmp_path, "reader"):
        outcomes = []
        for i in range(100, 140):
            try:
                outcomes.append(store.put_many([(key(i), value(i))], soon()))
            except StoreError as error:
                outcomes.append(error.failure)
        assert outcomes[-1] is MoveFailure.FULL
        assert (tmp_path / "data.mdb").stat().st_size <= CAPACITY
    store.maintain()  # the dead reader is cleared
    assert store.put_many([(key(i), value(i)) for i in range(200, 210)], soon()) == 10
    store.close()
