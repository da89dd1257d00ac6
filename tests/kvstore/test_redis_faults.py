"""A Redis server that is killed, restarted, slow, stopped, full, locked, or no Redis at all.

In every case: futures done within the timeout, a failure of the right kind, and service again
when the server is back.
"""

import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from tests.kvstore.redis_server import Proxy, RedisServer, free_port, garbage_server, slow_proxy

from moestro.core.page_moves import MoveFailure
from moestro.core.page_store import PageStore, StoreError
from moestro.errors import ConfigError
from moestro.kvstore import open_store

TIMEOUT_S = 0.5
DIGEST = bytes(16)
KEY, PAGE = b"k" * 16, b"page" * 1000


def open_at(url: str, timeout_s: float = TIMEOUT_S) -> PageStore:
    return open_store(url, digest=DIGEST, capacity_bytes=0, timeout_s=timeout_s)


def failure(future: "Future[object]") -> MoveFailure | None:
    """How it failed, or None; not done 1 s after the timeout fails the test."""
    error = future.exception(TIMEOUT_S + 1.0)
    assert error is None or isinstance(error, StoreError)
    return None if error is None else error.failure


def until_served(store: PageStore) -> None:
    """The breaker's cool-down is a few seconds at most here."""
    for _ in range(400):
        if failure(store.exists_many([KEY])) is None:
            return
        time.sleep(0.05)
    raise AssertionError("the store was never served again")


@pytest.fixture
def server() -> Iterator[RedisServer]:
    made = RedisServer()
    yield made
    made.resume()
    made.kill()


@pytest.fixture
def store(server: RedisServer) -> Iterator[PageStore]:
    made = open_at(server.url)
    assert made.put_many([(KEY, PAGE)]).result(10) == 1
    yield made
    made.close(1.0)


def every_call(store: PageStore) -> list["Future[object]"]:
    return [store.get_many([KEY]), store.put_many([(b"l" * 16, PAGE)]),
            store.exists_many([KEY]), store.delete([b"m" * 16])]  # fmt: skip


def test_killed_and_restarted(server: RedisServer, store: PageStore) -> None:
    server.kill()
    for _ in range(3):
        assert {failure(f) for f in every_call(store)} == {MoveFailure.UNAVAILABLE}
    assert store.usage().breaker == "open"
    server.start()
    until_served(store)
    assert store.get_many([KEY]).result(10) == [MoveFailure.MISSING]  # it kept nothing


def test_stopped_and_resumed(server: RedisServer, store: PageStore) -> None:
    server.pause()
    outcomes = [failure(f) for _ in range(3) for f in every_call(store)]
    assert set(outcomes) <= {MoveFailure.TIMEOUT, MoveFailure.UNAVAILABLE}
    assert MoveFailure.TIMEOUT in outcomes
    server.resume()
    until_served(store)
    assert store.get_many([KEY]).result(10) == [PAGE]


def test_slow(server: RedisServer, store: PageStore) -> None:
    delay_s = 2.0
    proxy = slow_proxy(server.port, lambda: delay_s)
    slow = open_at(proxy.url)
    outcomes = [failure(f) for _ in range(2) for f in every_call(slow)]
    assert set(outcomes) <= {MoveFailure.TIMEOUT, MoveFailure.UNAVAILABLE}
    delay_s = 0.0
    until_served(slow)
    assert slow.get_many([KEY]).result(10) == [PAGE]
    slow.close(1.0)
    proxy.close()


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\xff" * 50, b":7\r\n", b"$5\r\nhello\r\n",
     b"*1\r\n:1\r\n", b"+OK\r\n", b"$-1\r\n", b"*-1\r\n", b"$4\r\nab"],
    ids=ascii,
)  # fmt: skip
def test_garbage(answer: bytes) -> None:
    """No answer that isn't one becomes a page, a hit, a stored page or an exception of its own."""
    proxy: Proxy = garbage_server(answer)
    store = open_at(proxy.url, timeout_s=0.2)
    get, put, exists, _ = every_call(store)
    if failure(get) is None:
        assert get.result() == [MoveFailure.MISSING]
    assert failure(put) is not None
    if failure(exists) is None:
        assert exists.result() == [False]
    store.close(1.0)
    proxy.close()


def test_a_server_that_refuses_everything() -> None:
    proxy = garbage_server(b"-ERR no\r\n")
    with pytest.raises(ConfigError, match="refuses: no"):
        open_at(proxy.url)
    proxy.close()


def test_a_page_of_somebody_else_is_corrupt(server: RedisServer, store: PageStore) -> None:
    import redis

    with redis.Redis(port=server.port) as client:
        (name,) = client.keys("*")
        client.set(name, b"something else")
        client.set("moestro:kv:2:nonsense", b"x")
        client.set("another application", b"x")
    assert store.get_many([KEY]).result(10) == [MoveFailure.CORRUPT]
    assert store.usage().num_quarantined == 1
    assert store.get_many([KEY]).result(10) == [MoveFailure.MISSING]
    assert store.delete([KEY]).result(10) <= 1
    assert list(store.scan()) == []


def test_a_key_of_another_type(server: RedisServer, store: PageStore) -> None:
    import redis

    with redis.Redis(port=server.port) as client:
        (name,) = client.keys("*")
        client.delete(name)
        client.rpush(name, "a list")
    assert failure(store.get_many([KEY])) in (None, MoveFailure.ERROR)
    assert store.exists_many([b"o" * 16]).result(10) == [False]


def test_full() -> None:
    server = RedisServer("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    store = open_at(server.url)
    pages = [(bytes([i]) * 16, bytes(400_000)) for i in range(20)]
    num_stored = store.put_many(pages).result(10)
    assert 0 < num_stored < 20
    assert failure(store.put_many(pages[num_stored:])) is MoveFailure.FULL
    assert store.exists_many([k for k, _ in pages]).result(10).count(True) >= num_stored
    store.close(1.0)
    server.kill()


def test_a_password() -> None:
    server = RedisServer("--requirepass", "s3cret/@")
    with pytest.raises(ConfigError, match="password belongs into the URL"):
        open_at(server.url)
    with pytest.raises(ConfigError) as caught:
        open_at(server.url.replace("//", "//:wr0ng@"))
    assert "wr0ng" not in str(caught.value)
    store = open_at(server.url.replace("//", "//:s3cret%2F%40@"))
    assert store.put_many([(KEY, PAGE)]).result(10) == 1
    store.close(1.0)
    server.kill()


def test_a_server_that_is_not_there_yet(caplog: pytest.LogCaptureFixture) -> None:
    store = open_at(f"redis://127.0.0.1:{free_port()}/0")
    assert "can't be reached" in caplog.text
    assert failure(store.get_many([KEY])) is MoveFailure.UNAVAILABLE
    store.close(1.0)


def test_another_database_is_another_store(server: RedisServer, store: PageStore) -> None:
    other = open_at(server.url[:-1] + "1")
    assert other.exists_many([KEY]).result(10) == [False]
    other.close(1.0)


def test_a_password_that_the_server_quotes_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """A server without AUTH quotes its arguments; something that is no Redis may echo them."""
    server = RedisServer("--rename-command", "AUTH", "")
    answers = [b"-ERR no s3cret", b"-OOM s3cret", b"!s3cret", b"-NOAUTH s3cret", b"+s3cret"]
    proxies = [garbage_server(answer + b"\r\n") for answer in answers]
    for url in (server.url, *(proxy.url for proxy in proxies)):
        try:
            store = open_at(url.replace("//", "//me:s3cret@"), timeout_s=0.2)
        except ConfigError as error:
            told = "".join(traceback.format_exception(error))
        else:
            told = "".join(
                "".join(traceback.format_exception(f.exception(5))) for f in every_call(store)
            )
            store.close(1.0)
        told = told.replace('"//me:s3cret@"', "")  # this test's own line
        assert "s3cret" not in told
    assert "s3cret" not in caplog.text
    for proxy in proxies:
        proxy.close()
    server.kill()


def test_a_database_that_is_not_there(server: RedisServer) -> None:
    with pytest.raises(ConfigError, match=r"out of range.*number of a database"):
        open_at(server.url[:-1] + "999999")
