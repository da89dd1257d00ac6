"""`moestro kv` on real stores, sound ones and damaged ones."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.terminal import main
from tests.kvstore.redis_server import RedisServer

from moestro.kvstore import open_store
from moestro.kvstore.opening import open_backend

ONE, TWO = b"\x11" * 16, b"\x22" * 16
CAPACITY = 16 * 2**20


def key(i: int) -> bytes:
    return i.to_bytes(16, "big")


@pytest.fixture(params=["lmdb", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store with ten pages of 100 kB in one namespace and three in another."""
    server = RedisServer() if request.param == "redis" else None
    url = f"lmdb://{tmp_path}/kv" if server is None else server.url
    fill(url)
    yield url
    if server is not None:
        server.kill()


@pytest.fixture
def lmdb_url(tmp_path: Path) -> str:
    url = f"lmdb://{tmp_path}/kv"
    fill(url)
    return url


def fill(url: str) -> None:
    for digest, num in ((ONE, 10), (TWO, 3)):
        store = open_store(url, digest=digest, capacity_bytes=CAPACITY)
        store.put_many([(key(i), bytes([i]) * 100_000) for i in range(num)]).result(20)
        store.close(10)


def output(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["kv", *arguments]) == code
    return capsys.readouterr().out


def facts(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> object:
    found: object = json.loads(output(capsys, *arguments, "--json", code=code))
    return found


def namespaces(capsys: pytest.CaptureFixture[str], url: str) -> list[str]:
    rows = facts(capsys, "ls", url)
    assert isinstance(rows, list)
    return [row["namespace"] for row in rows]


def spoil(url: str, number: int) -> None:
    from moestro.kvstore.backend import Deadline

    backend = open_backend(url, capacity_bytes=CAPACITY)
    (value,) = backend.get_many([ONE + key(number)], Deadline(10))
    assert value is not None
    backend.delete([ONE + key(number)], Deadline(10))
    backend.put_many(
        [(ONE + key(number), value._replace(payload=bytes(value.payload)[:-1] + b"x"))],
        Deadline(10),
    )
    backend.close()


def test_ls(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = facts(capsys, "ls", url)
    assert rows == [
        {"namespace": ONE.hex(), "num_pages": 10, "num_bytes": 1_000_640},
        {"namespace": TWO.hex(), "num_pages": 3, "num_bytes": 300_192},
    ]
    lines = output(capsys, "ls", url).splitlines()
    assert lines[0].split() == ["namespace", "pages", "bytes", "bytes", "a", "page"]
    assert lines[1].split() == [ONE.hex(), "10", "1.00", "MB", "100.1", "kB"]
    assert sorted(output(capsys, "ls", url, "22").split()) == [key(i).hex() for i in range(3)]
    assert facts(capsys, "ls", url, "2222") == output(capsys, "ls", url, "22").split()


def test_stat(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, "stat", url)
    assert isinstance(found, dict)
    assert (found["num_namespaces"], found["num_pages"], found["value_bytes"]) == (2, 13, 1_300_832)
    if found["store"] == "lmdb":
        assert found["capacity_bytes"] == CAPACITY
        assert found["value_bytes"] < found["used_bytes"] < found["file_bytes"] < CAPACITY
    assert "num pages" in output(capsys, "stat", url)


def test_verify(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "13 pages of 1.30 MB are right, 0 corrupt" in output(capsys, "verify", url)
    spoil(url, 4)
    found = facts(capsys, "verify", url, code=1)
    assert found == {
        "num_right": 12, "payload_bytes": 1_200_000, "num_gone": 0, "num_deleted": 0,
        "corrupt": [{"namespace": ONE.hex(), "page": key(4).hex(), "failed_check": "checksum"}],
    }  # fmt: skip
    assert f"{(ONE + key(4)).hex()}: checksum" in output(capsys, "verify", url, code=1)
    assert "1 corrupt, 1 of these deleted" in output(capsys, "verify", url, "--delete")
    assert "12 pages of 1.20 MB are right, 0 corrupt" in output(capsys, "verify", url)


def test_drop(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "drop", url, "1") == "10 pages deleted\n"
    assert namespaces(capsys, url) == [TWO.hex()]
    assert facts(capsys, "drop", url, "--all") == {"num_deleted": 3}
    assert facts(capsys, "ls", url) == []


def test_gc_keeps_a_namespace(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "gc", url, "--keep", TWO.hex())
    assert text.startswith("1 namespaces dropped, 10 pages deleted\n")
    assert namespaces(capsys, url) == [TWO.hex()]


def test_gc_shrinks_an_lmdb_store(lmdb_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, "gc", lmdb_url, "--to", "500kB")
    assert isinstance(found, dict)
    assert found["compacted"]
    assert found["num_deleted"] == 9
    assert found["file_bytes"] < 600_000
    open_store(lmdb_url, digest=ONE, capacity_bytes=2**20).close(10)  # fits a smaller budget now


def test_a_store_in_use_is_looked_at_and_not_compacted(
    lmdb_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import subprocess
    import sys

    program = (
        "import sys; from moestro.kvstore import open_store\n"
        "s = open_store(sys.argv[1], digest=bytes(16), capacity_bytes=2**24)\n"
        "print('open', flush=True); sys.stdin.read(); s.close(5)"
    )
    engine = subprocess.Popen(
        [sys.executable, "-c", program, lmdb_url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert engine.stdout is not None
    assert engine.stdout.readline() == b"open\n"
    assert "another process" in output(capsys, "gc", lmdb_url)
    assert "13 pages" in output(capsys, "verify", lmdb_url)
    engine.communicate()
    assert "compacted)" in output(capsys, "gc", lmdb_url)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "nonsense"], "kv_store is 'nonsense'"),
        (["ls", "{missing}"], "holds no store"),
        (["ls", "{url}", "3"], "No namespace starts with '3'"),
        (["drop", "{url}", ""], "No namespace starts with ''"),
        (["drop", "{url}"], "or say --all"),
        (["drop", "{url}", "11", "--all"], "or say --all"),
        (["gc", "{url}", "--keep", "ff"], "No namespace starts with 'ff'"),
        (["gc", "{url}", "--to", "much"], "--to is 'much'"),
        (["gc", "{url}", "--to", "-1"], "--to is '-1'"),
    ],
)
def test_mistakes(
    arguments: list[str],
    message: str,
    lmdb_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"url": lmdb_url, "missing": f"lmdb://{tmp_path}/missing"}
    assert main(["kv", *(a.format(**names) for a in arguments)]) == 2
    assert message in capsys.readouterr().err
    assert len(namespaces(capsys, lmdb_url)) == 2
    assert not (tmp_path / "missing").exists()


def test_a_damaged_store_is_one_line(
    lmdb_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kv" / "data.mdb").write_bytes(b"text" * 10_000)
    assert main(["kv", "verify", lmdb_url]) == 1
    error = capsys.readouterr().err
    assert "is damaged" in error
    assert error.count("\n") == 1
