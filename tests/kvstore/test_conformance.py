"""What PageStore promises, held against every backend."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kvstore.places import (
    DIGEST,
    OTHER_DIGEST,
    Place,
    lmdb_place,
    memory_place,
    mooncake_place,
    redis_place,
)
from tests.kvstore.redis_server import RedisServer

from moestro.core.page_moves import MoveFailure
from moestro.core.page_store import PageStore, StoreError
from moestro.kvstore.threaded import ThreadedStore


@pytest.fixture(params=["memory", "lmdb", "lmdb-always", "redis", "mooncake"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "memory":
        found = memory_place()
    elif request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        server.flush()
        found = redis_place(server.url)
    elif request.param == "mooncake":
        found = mooncake_place(request.getfixturevalue("mooncake_url"))
    else:
        found = lmdb_place(tmp_path / "store", "always" if "always" in request.param else "batch")
    yield found
    found.close()


def key(i: int) -> bytes:
    return i.to_bytes(16, "big")


def page(i: int, size: int = 3000) -> bytes:
    return bytes((i * 7 + j) % 251 for j in range(size))


def pages(*numbers: int) -> list[tuple[bytes, bytes]]:
    return [(key(i), page(i)) for i in numbers]


def test_an_empty_store(place: Place) -> None:
    store = place.open()
    assert store.get_many([key(1), key(2)]).result() == [MoveFailure.MISSING] * 2
    assert store.exists_many([key(1)]).result() == [False]
    assert store.delete([key(1)]).result() == 0
    assert listed(place, store) in ([], None)


def listed(place: Place, store: PageStore) -> list[bytes] | None:
    """Its keys in order; None where it can't list them, which it then says."""
    if place.lists:
        return sorted(store.scan())
    with pytest.raises(StoreError, match="can't list"):
        list(store.scan())
    return None


def test_calls_with_nothing_in_them(place: Place) -> None:
    store = place.open()
    assert store.get_many([]).result() == []
    assert store.put_many([]).result() == 0
    assert store.exists_many([]).result() == []
    assert store.delete([]).result() == 0


def test_pages_come_back_as_they_were(place: Place) -> None:
    store = place.open()
    sizes = [0, 1, 100, 2040, 4096, 65537, 1_000_000]
    listed = [(key(i), page(i, size)) for i, size in enumerate(sizes)]
    assert store.put_many(listed).result() == len(sizes)
    assert store.get_many([k for k, _ in listed]).result() == [p for _, p in listed]
    assert store.get_many([key(3), key(99), key(0)]).result() == [
        page(3, 2040), MoveFailure.MISSING, b"",
    ]  # fmt: skip


def test_the_same_page_twice(place: Place) -> None:
    store = place.open()
    assert store.put_many([*pages(1, 2), *pages(1)]).result() == 3
    assert store.put_many(pages(2, 3)).result() == 2
    assert listed(place, store) in ([key(1), key(2), key(3)], None)
    assert store.get_many([key(1), key(1)]).result() == [page(1)] * 2


def test_exists_delete_and_scan(place: Place) -> None:
    store = place.open()
    store.put_many(pages(*range(10))).result()
    assert store.exists_many([key(9), key(10), key(0)]).result() == [True, False, True]
    assert store.delete([key(9), key(10), key(0), key(9)]).result() == 2
    assert store.exists_many([key(9), key(0), key(1)]).result() == [False, False, True]
    assert listed(place, store) in ([key(i) for i in range(1, 9)], None)
    assert store.put_many(pages(9)).result() == 1
    assert store.get_many([key(9)]).result() == [page(9)]


def test_namespaces_know_nothing_of_each_other(place: Place) -> None:
    store, other = place.open(), place.open(OTHER_DIGEST)
    store.put_many(pages(1, 2)).result()
    assert other.exists_many([key(1)]).result() == [False]
    assert other.get_many([key(1)]).result() == [MoveFailure.MISSING]
    other.put_many([(key(1), b"another page")]).result()
    assert other.delete([key(2)]).result() == 0
    assert store.get_many([key(1), key(2)]).result() == [page(1), page(2)]
    assert listed(place, other) in ([key(1)], None)
    with place.raw() as backend:
        if not place.lists:
            with pytest.raises(StoreError, match="can't list"):
                backend.namespaces()
            return
        assert sorted(backend.scan(b"")) == sorted(
            [DIGEST + key(1), DIGEST + key(2), OTHER_DIGEST + key(1)]
        )
        counts = {n.digest: n.num_pages for n in backend.namespaces()}
    assert counts == {DIGEST: 2, OTHER_DIGEST: 1}


def test_another_engine_sees_the_pages_and_so_does_the_next(place: Place) -> None:
    first, second = place.open(), place.open()
    first.put_many(pages(1)).result()
    assert second.get_many([key(1)]).result() == [page(1)]
    first.close(10.0)
    second.put_many(pages(2)).result()
    second.close(10.0)
    assert place.open().get_many([key(1), key(2)]).result() == [page(1), page(2)]


def test_a_buffer_is_free_when_its_put_is_done_and_a_page_is_the_readers_own(place: Place) -> None:
    store = place.open()
    buffer = bytearray(page(1))
    store.put_many([(key(1), buffer)]).result()
    buffer[:] = bytes(len(buffer))
    (payload,) = store.get_many([key(1)]).result()
    assert store.delete([key(1)]).result() == 1
    store.put_many(pages(2, 3, 4)).result()
    store.close(10.0)
    assert payload == page(1)


@pytest.mark.parametrize("where", ["header", "payload", "checksum", "length", "nothing left"])
def test_a_corrupt_page_is_told_once_counted_and_then_gone(place: Place, where: str) -> None:
    store = place.open()
    store.put_many(pages(1, 2)).result()
    if where == "nothing left" and not place.holds_empty:
        where = "length"

    def spoil(value: bytearray) -> None:
        if where == "length":
            del value[-1:]
        elif where == "nothing left":
            value.clear()
        else:
            value[{"header": 30, "payload": 1000, "checksum": 55}[where]] ^= 16

    place.spoil(DIGEST + key(1), spoil)
    assert store.get_many([key(1), key(2)]).result() == [MoveFailure.CORRUPT, page(2)]
    assert store.get_many([key(1)]).result() == [MoveFailure.MISSING]
    assert store.exists_many([key(1), key(2)]).result() == [False, True]
    assert store.usage().num_quarantined == 1
    assert store.put_many(pages(1)).result() == 1
    assert store.get_many([key(1)]).result() == [page(1)]
    assert place.open().get_many([key(1)]).result() == [page(1)]


def test_a_page_under_another_name_is_corrupt(place: Place) -> None:
    store = place.open()
    store.put_many(pages(1)).result()
    with place.raw() as backend:
        from moestro.kvstore.backend import Deadline

        (value,) = backend.get_many([DIGEST + key(1)], Deadline(5))
        assert value is not None
        backend.put_many([(DIGEST + key(2), value), (OTHER_DIGEST + key(1), value)], Deadline(5))
    assert store.get_many([key(2)]).result() == [MoveFailure.CORRUPT]
    assert place.open(OTHER_DIGEST).get_many([key(1)]).result() == [MoveFailure.CORRUPT]


def test_many_at_once(place: Place) -> None:
    stores = [place.open(), place.open()]
    wrong: list[object] = []

    def work(store: ThreadedStore, seed: int) -> None:
        for i in range(20):
            number = (seed * 5 + i) % 30
            if store.put_many(pages(number)).result() != 1:
                wrong.append(number)
            found = store.get_many([key(number), key(number + 100)]).result()
            if found != [page(number), MoveFailure.MISSING]:
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(stores[n % 2], n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert {s.usage().breaker for s in stores} == {"closed"}


def test_closing(place: Place) -> None:
    store = place.open()
    last = store.put_many(pages(*range(20)))
    store.close(10.0)
    store.close(10.0)
    assert last.result(0) == 20
    for late in (store.get_many([key(1)]), store.put_many(pages(1)), store.exists_many([key(1)])):
        with pytest.raises(StoreError) as caught:
            late.result(0)
        assert caught.value.failure is MoveFailure.CANCELLED
    assert place.open().exists_many([key(i) for i in range(20)]).result() == [True] * 20


def test_usage_has_no_opinion_it_can_not_have(place: Place) -> None:
    store = place.open()
    assert store.put_many(pages(1, 2)).result() == 2
    usage = store.usage()
    assert usage.breaker == "closed"
    assert usage.num_quarantined == 0
    assert usage.capacity_bytes >= 0
    assert usage.num_pages in (2, None)
    assert usage.bytes_used is None or usage.bytes_used >= 6000
