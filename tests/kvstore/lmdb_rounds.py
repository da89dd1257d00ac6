"""Rounds of damage to an LMDB store, each in forked processes: run as a program.

    python -m tests.kvstore.lmdb_rounds kill FOLDER ROUNDS
    python -m tests.kvstore.lmdb_rounds flip FOLDER ROUNDS
    python -m tests.kvstore.lmdb_rounds race FOLDER ROUNDS

A process that was imported once and has no threads forks the ones that write, are killed, and
look. The last line of its output is one JSON object.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from moestro.core.page_store import StoreError
from moestro.kvstore import codec
from moestro.kvstore.backend import Deadline
from moestro.kvstore.lmdb_store import LmdbStore

CAPACITY = 8 * 2**20
DIGEST = bytes(16)
OPEN_S = 20.0


def page(i: int) -> bytes:
    """What page i holds; anything else under its name is a wrong page."""
    return random.Random(i).randbytes(20_000 + i * 7919 % 60_000)


def key(i: int) -> bytes:
    return DIGEST + i.to_bytes(16, "big")


def value(i: int) -> codec.Value:
    return codec.seal(DIGEST, key(i)[16:], page(i))


def open_store(folder: Path, number: int = 0) -> LmdbStore:
    return LmdbStore(folder, CAPACITY, ("batch", "always")[number % 2], Deadline(OPEN_S))


def in_child(work: Callable[[], None]) -> int:
    """The child's process id; it ends with status 0 only if `work` returns."""
    if pid := os.fork():
        return pid
    try:
        work()
        os._exit(0)
    except BaseException as error:
        print(f"child: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def ended_well(pid: int) -> bool:
    return os.waitpid(pid, 0)[1] == 0


def write_for_ever(folder: Path, number: int, started: int) -> None:
    """New pages, deletions and uses, in small transactions."""
    store = open_store(folder, number)
    os.write(started, b"x")
    chance = random.Random(number)
    while True:
        numbers = [chance.randrange(2000) for _ in range(8)]
        store.put_many([(key(i), value(i)) for i in numbers], Deadline(OPEN_S))
        store.get_many([key(i) for i in numbers[:4]], Deadline(OPEN_S))
        store.delete([key(i) for i in numbers[6:]], Deadline(OPEN_S))
        store.maintain()


def check_all(folder: Path) -> Counter[str]:
    """Open, read every page, compare the tables with each other."""
    store = open_store(folder)
    seen: Counter[str] = Counter()
    for name in list(store.scan(b"")):
        (stored,) = store.get_many([name], Deadline(OPEN_S))
        number = int.from_bytes(name[16:], "big")
        try:
            assert stored is not None
            payload = codec.unseal(stored, DIGEST, name[16:])
        except codec.CorruptValueError:
            seen["corrupt"] += 1
        else:
            seen["right" if payload == page(number) else "wrong"] += 1
    num_bytes, num_pages = store.totals()
    assert num_bytes is not None
    with store._env.reading(Deadline(OPEN_S)) as txn:
        entries = {name: txn.stat(db=table)["entries"] for name, table in store._env.tables.items()}
    if not entries[b"pages"] == entries[b"index"] == entries[b"uses"] == num_pages:
        seen["tables disagree"] += 1
    if (folder / "data.mdb").stat().st_size > CAPACITY:
        seen["over budget"] += 1
    store.close()
    return seen


def looked_at(folder: Path) -> Counter[str]:
    """check_all in a fresh process: what it saw, or how it ended."""
    ours, theirs = os.pipe()

    def look() -> None:
        try:
            seen = check_all(folder)
        except StoreError as error:
            seen = Counter({f"refused as {error.failure}": 1})
        os.write(theirs, json.dumps(seen).encode())

    pid = in_child(look)
    os.close(theirs)
    with os.fdopen(ours, "rb") as answer:
        text = answer.read()
    return Counter(json.loads(text)) if ended_well(pid) else Counter({"crashed": 1})


def kill_rounds(folder: Path, rounds: int) -> Counter[str]:
    """kill -9 at a random instant while writing."""
    chance, seen = random.Random(4), Counter[str]()
    for number in range(rounds):
        ours, theirs = os.pipe()
        pid = in_child(partial(write_for_ever, folder, number, theirs))
        os.close(theirs)
        started = os.read(ours, 1)
        os.close(ours)
        time.sleep(chance.random() * 0.15)
        os.kill(pid, signal.SIGKILL)
        killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        seen["killed" if started and killed else "not killed"] += 1
        seen += looked_at(folder)
        tell(number, rounds)
    return seen


def flip_rounds(folder: Path, rounds: int) -> Counter[str]:
    """One bit of the file, anywhere: right pages, corrupt pages or a refusal, nothing else."""
    chance, seen = random.Random(5), Counter[str]()
    sound = folder / "sound"
    store = open_store(sound)
    store.put_many([(key(i), value(i)) for i in range(30)], Deadline(OPEN_S))
    store.delete([key(i) for i in range(0, 30, 7)], Deadline(OPEN_S))
    store.close()
    data = (sound / "data.mdb").read_bytes()
    for number in range(rounds):
        broken = folder / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        broken.mkdir()
        # Half of the flips where the structure is: the first pages and the last ones.
        edge = number % 2 and chance.choice((range(16384), range(len(data) - 65536, len(data))))
        at = chance.choice(edge or range(len(data)))
        flipped = bytearray(data)
        flipped[at] ^= 1 << chance.randrange(8)
        (broken / "data.mdb").write_bytes(flipped)
        found = looked_at(broken)
        if found["crashed"] or found["wrong"]:
            print(f"bit flip in byte {at}: {found}", file=sys.stderr)
        seen["flipped"] += 1
        seen += found
        tell(number, rounds)
    return seen


def race_rounds(folder: Path, rounds: int) -> Counter[str]:
    """Two processes that write the same pages at the same time."""
    seen: Counter[str] = Counter()

    def write() -> None:
        store = open_store(folder)
        for begin in range(0, 80, 8):
            values = [(key(i), value(i)) for i in range(begin, begin + 8)]
            assert store.put_many(values, Deadline(OPEN_S)) == 8
        store.close()

    for number in range(rounds):
        shutil.rmtree(folder, ignore_errors=True)
        writers = [in_child(write) for _ in range(2)]
        seen["failed writers"] += sum(not ended_well(pid) for pid in writers)
        seen += looked_at(folder)
        tell(number, rounds)
    return seen


def tell(number: int, rounds: int) -> None:
    if (number + 1) % 50 == 0:
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)


ROUNDS = {"kill": kill_rounds, "flip": flip_rounds, "race": race_rounds}

if __name__ == "__main__":
    what, where, number_of_rounds = sys.argv[1:]
    print(json.dumps(ROUNDS[what](Path(where), int(number_of_rounds))))
