"""The LMDB store's budget, its eviction, and what several users of one folder share."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moestro.core.page_moves import MoveFailure
from moestro.core.page_store import StoreError
from moestro.kvstore import data_file, lmdb_environment, lmdb_store
from moestro.kvstore.backend import Deadline
from moestro.kvstore.codec import Value, seal
from moestro.kvstore.lmdb_store import HIGH_WATER, LmdbStore

MIB = 2**20
CAPACITY = 4 * MIB


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[LmdbStore]:
    made = LmdbStore(folder, CAPACITY, "batch", Deadline(5))
    yield made
    made.close()


def soon() -> Deadline:
    return Deadline(10)


def key(i: int, digest: bytes = bytes(16)) -> bytes:
    return digest + i.to_bytes(16, "big")


def value(payload: bytes) -> Value:
    """Under any key: a backend doesn't look at seals."""
    return seal(bytes(16), bytes(16), payload)


def put(store: LmdbStore, numbers: range, size: int = 100_000) -> int:
    return store.put_many([(key(i), value(os.urandom(size))) for i in numbers], soon())


def there(store: LmdbStore, numbers: range) -> list[int]:
    found = store.exists_many([key(i) for i in numbers], soon())
    return [i for i, is_there in zip(numbers, found, strict=True) if is_there]


def data_bytes(folder: Path) -> int:
    return (folder / "data.mdb").stat().st_size


def test_the_file_never_outgrows_the_budget(store: LmdbStore, folder: Path) -> None:
    for begin in range(0, 400, 8):
        assert put(store, range(begin, begin + 8)) == 8
        assert data_bytes(folder) <= CAPACITY
        num_bytes, num_pages = store.totals()
        assert num_bytes is not None
        assert num_bytes <= HIGH_WATER * CAPACITY
        assert num_pages == len(there(store, range(begin + 8)))
    assert len(there(store, range(400))) >= 0.7 * CAPACITY / 100_000


def test_sizes_that_do_not_fit_into_each_others_places(store: LmdbStore, folder: Path) -> None:
    """The map fills up with free pages that are too scattered: more is evicted."""
    number = 0
    for turn in range(60):
        size = (50_000, 900_000, 160_000)[turn % 3]
        num = 1_600_000 // size
        assert put(store, range(number, number + num), size) == num
        assert there(store, range(number, number + num)) == [*range(number, number + num)]
        number += num
        assert data_bytes(folder) <= CAPACITY


def test_evicts_what_was_used_longest_ago(store: LmdbStore) -> None:
    put(store, range(30))
    store.get_many([key(i) for i in range(5)], soon())  # a use, though written before the others
    put(store, range(30, 40))
    assert there(store, range(5)) == [*range(5)]
    assert there(store, range(30, 40)) == [*range(30, 40)]
    assert there(store, range(5, 30)) == [*range(5, 5 + len(there(store, range(5, 30))))]


def test_the_end_of_a_run_goes_before_its_beginning(store: LmdbStore) -> None:
    put(store, range(20))
    store.shrink(5 * 102_400, soon())
    assert there(store, range(20)) == [*range(5)]
    store.get_many([key(i) for i in range(4)], soon())
    store.shrink(2 * 102_400, soon())
    assert there(store, range(20)) == [0, 1]


def test_uses_survive_a_restart_and_no_clock_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: -1e9)
    store = LmdbStore(folder, CAPACITY, "batch", soon())
    put(store, range(20))
    store.get_many([key(19)], soon())
    store.maintain()
    store.close()
    store = LmdbStore(folder, CAPACITY, "batch", soon())
    assert store.totals() == (20 * 102_400, 20)
    store.shrink(3 * 102_400, soon())
    assert there(store, range(20)) == [0, 1, 19]
    store.close()


def test_a_page_that_can_never_fit_is_refused_and_evicts_nothing(store: LmdbStore) -> None:
    put(store, range(10))
    assert put(store, range(10, 11), CAPACITY) == 0
    values = [(key(11), value(b"small")), (key(12), value(bytes(CAPACITY))), (key(13), value(b""))]
    assert store.put_many(values, soon()) == 1
    assert there(store, range(20)) == [*range(10), 11]


def test_a_put_that_comes_too_late_leaves_nothing(store: LmdbStore) -> None:
    with pytest.raises(StoreError) as caught:
        store.put_many([(key(1), value(b"page"))], Deadline(0))
    assert caught.value.failure is MoveFailure.TIMEOUT
    assert there(store, range(3)) == []
    assert store.totals() == (0, 0)


def test_totals_by_namespace(store: LmdbStore) -> None:
    one, two = b"1" * 16, b"2" * 16
    store.put_many([(key(i, one), value(bytes(5000))) for i in range(3)], soon())
    store.put_many([(key(1, two), value(bytes(10)))], soon())
    assert {(n.digest, n.num_pages, n.num_bytes) for n in store.namespaces()} == {
        (one, 3, 15000 + 3 * 64), (two, 1, 10 + 64),
    }  # fmt: skip
    store.delete([key(1, two)], soon())
    assert [n.digest for n in store.namespaces()] == [one]
    assert store.totals() == (3 * 8192, 3)


@pytest.mark.parametrize("num", [0, 99, 100, 101, 250])
def test_scanning_more_than_one_read_of_keys(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    monkeypatch.setattr(lmdb_store, "SCAN_KEYS", 100)
    store.put_many([(key(i), value(b"")) for i in range(num)], soon())
    store.put_many([(key(1, b"2" * 16), value(b""))], soon())
    assert list(store.scan(bytes(16))) == [key(i) for i in range(num)]
    assert len(list(store.scan(b""))) == num + 1


def test_compaction_gives_space_back(store: LmdbStore, folder: Path) -> None:
    put(store, range(30))
    store.shrink(5 * 102_400, soon())
    before = data_bytes(folder)
    assert store.compact(soon())
    assert data_bytes(folder) < before / 3
    assert there(store, range(30)) == [*range(5)]
    put(store, range(30, 33))
    assert there(store, range(30, 33)) == [30, 31, 32]


def test_syncs_and_never_a_writable_map(folder: Path) -> None:
    for sync in ("always", "batch"):
        store = LmdbStore(folder / sync, CAPACITY, sync, soon())
        flags = store._env._env.flags()
        assert (flags["sync"], flags["writemap"], flags["map_async"]) == (True, False, False)
        assert flags["metasync"] == (sync == "always")
        store.close()


def test_batch_syncs_once_when_there_is_something(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = []
    monkeypatch.setattr(store._env, "flush", lambda: syncs.append(1))
    store.maintain()
    assert syncs == []
    put(store, range(1))
    store.maintain()
    store.maintain()
    assert syncs == [1]


def test_the_folder_is_private(store: LmdbStore, folder: Path) -> None:
    """It holds what people wrote, in a form that can be read back."""
    assert folder.stat().st_mode & 0o077 == 0
    assert all(f.stat().st_mode & 0o077 == 0 for f in folder.iterdir())


def test_one_process_opens_a_folder_once(store: LmdbStore, folder: Path) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder)
    second = LmdbStore(link, CAPACITY, "batch", soon())
    assert second._env is store._env
    put(second, range(3))
    second.close()
    assert there(store, range(3)) == [0, 1, 2]
    third = LmdbStore(folder, CAPACITY, "batch", soon())
    assert third._env is store._env
    third.close()


def test_everything_is_let_go(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        store = LmdbStore(folder, CAPACITY, "batch", soon())
        put(store, range(2))
        store.close()
    assert not lmdb_environment._open_environments
    assert len(os.listdir("/proc/self/fd")) == before


OTHER_PROCESS = """
import sys
from pathlib import Path
from moestro.kvstore.backend import Deadline
from moestro.kvstore.codec import Value, seal
from moestro.kvstore.codec import Value
from moestro.kvstore.lmdb_store import LmdbStore
store = LmdbStore(Path(sys.argv[1]), int(sys.argv[2]), "batch", Deadline(10))
print("open", flush=True)
for line in sys.stdin:
    first, last, size = map(int, line.split())
    keys = [bytes(16) + i.to_bytes(16, "big") for i in range(first, last)]
    values = [Value(bytes(64), bytes(size))] * len(keys)
    print(store.put_many(list(zip(keys, values)), Deadline(10)), flush=True)
store.close()
"""


def other_process(folder: Path, capacity: int) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, str(folder), str(capacity)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def ask(process: "subprocess.Popen[str]", text: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_another_process_with_a_larger_budget(store: LmdbStore, folder: Path) -> None:
    put(store, range(10))
    with other_process(folder, 4 * CAPACITY) as other:
        assert ask(other, "100 200 100000") == "100"
        assert there(store, range(90, 210)) == [*range(100, 200)]
        assert put(store, range(20, 22)) == 2
        assert not store.compact(soon())
        other.communicate()
    assert store.compact(soon())
    assert there(store, range(20, 22)) == [20, 21]


def test_what_is_evicted_is_counted(store: LmdbStore) -> None:
    put(store, range(20))
    assert store.num_evicted == 0
    put(store, range(20, 60))
    assert store.num_evicted == 60 - len(there(store, range(60))) > 0


def test_payloads_of_all_sizes_before_and_after_compaction(store: LmdbStore) -> None:
    """Small ones share a file page, large ones are read from where they were written."""
    values = {key(i): value(os.urandom(size)) for i, size in enumerate(
        (0, 1, 1000, 2030, 2040, 4079, 4080, 4095, 4096, 4097, 8176, 70_000, 600_000)
    )}  # fmt: skip
    store.put_many(list(values.items()), soon())
    put(store, range(100, 110))
    store.delete([key(i) for i in range(100, 110)], soon())
    for _ in range(2):
        found = store.get_many(list(values), soon())
        assert [v and (v.seal, bytes(v.payload)) for v in found] == [
            (v.seal, v.payload) for v in values.values()
        ]
        assert store.compact(soon())
        put(store, range(200, 202), 500_000)


def test_memory_that_was_read_into_is_not_lent_while_it_is_looked_at(store: LmdbStore) -> None:
    values = [(key(i), value(bytes([i]) * 50_000)) for i in range(20)]
    store.put_many(values, soon())
    kept = [store.get_many([key(i)], soon()) for i in range(10)]
    for i in range(10, 20):
        store.get_many([key(i)], soon())
    assert [bytes(v.payload) for (v,) in kept if v] == [v.payload for _, v in values[:10]]


def test_the_walk_at_opening_leaves_no_holes_in_the_systems_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LmdbStore(folder, 64 * MIB, "always", soon())
    put(store, range(20), MIB)
    store.close()
    data = folder / "data.mdb"
    cached: list[int] = []
    verify = lmdb_environment.structure.verify

    def walk(path: str) -> list[str]:
        problems: list[str] = verify(path)
        cached.append(num_cached(data))
        return problems

    monkeypatch.setattr(lmdb_environment.structure, "verify", walk)
    with data.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if num_cached(data):
        pytest.skip("this file system keeps its files in memory")
    with lmdb_environment.cache_left_alone(data):
        walk(str(folder))
    assert cached[0] > 20
    assert num_cached(data) == 0
    data.read_bytes()
    before = num_cached(data)
    with lmdb_environment.cache_left_alone(data):
        walk(str(folder))
    assert num_cached(data) == before > 5000


def num_cached(path: Path) -> int:
    with path.open("rb") as file:
        return int(data_file._cached(file.fileno()).sum())


FORKED = """
import os, sys
from pathlib import Path
from moestro.core.page_store import StoreError
from moestro.kvstore.backend import Deadline
from moestro.kvstore.codec import Value
from moestro.kvstore.lmdb_store import LmdbStore
def opened():
    return LmdbStore(Path(sys.argv[1]), 2**24, "batch", Deadline(10))
store = opened()
one, two = (bytes(31) + bytes([i]) for i in range(2))
store.put_many([(one, Value(bytes(64), b"one"))], Deadline(10))
if os.fork() == 0:
    try:
        store.get_many([one], Deadline(10))
    except StoreError as error:
        assert "open it again" in str(error), error
    else:
        os._exit(1)
    own = opened()
    assert own.get_many([one], Deadline(10))[0].payload == b"one"
    own.put_many([(two, Value(bytes(64), b"two"))], Deadline(10))
    own.close()
    store.close()
    os._exit(0)
assert os.wait()[1] == 0
assert store.get_many([two], Deadline(10))[0].payload == b"two"
print("both")
"""


def test_a_forked_child_opens_its_own(folder: Path) -> None:
    program = [sys.executable, "-c", FORKED, str(folder)]
    found = subprocess.run(program, capture_output=True, text=True, check=False)
    assert found.stdout == "both\n", found.stderr
