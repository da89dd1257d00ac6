"""What --kv-store may say, and the answers to what it may not."""

import os
from pathlib import Path

import pytest

from moestro.errors import ConfigError
from moestro.kvstore import open_store
from moestro.kvstore.opening import split_url

DIGEST = bytes(16)


@pytest.mark.parametrize(
    "url",
    ["", "none", "lmdb:", "lmdb://", "/var/kv", "lmdb:/var/kv", "LMDB:///var/kv", "s3://bucket",
     "redis:6379", "redis://host:port/0", "redis://host:70000/0", "lmdb://[", "file:///x"],
)  # fmt: skip
def test_urls_that_mean_nothing(url: str) -> None:
    with pytest.raises(ConfigError, match="kv_store is") as caught:
        split_url(url)
    assert "lmdb://PATH" in str(caught.value)


def test_an_lmdb_url_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for url, folder in (
        (f"lmdb://{tmp_path}/a b%25", "a b%"),
        ("lmdb://relative/store", "relative/store"),
        ("lmdb://~/kv", "home/kv"),
    ):
        open_store(url, digest=DIGEST, capacity_bytes=2**20).close(5)
        assert (tmp_path / folder / "data.mdb").is_file()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"url": "lmdb:///tmp/a?b"}, "mean nothing in a path"),
        ({"capacity_bytes": 1}, "at least 1,048,576"),
        ({"sync": "never"}, "one of"),
        ({"timeout_s": 0.0}, "above 0"),
    ],
)
def test_wrong_settings(changes: dict[str, object], what: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {"url": f"lmdb://{tmp_path}", "capacity_bytes": 2**20, **changes}
    with pytest.raises(ConfigError, match=what):
        open_store(digest=DIGEST, **settings)  # type: ignore[arg-type]
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("url", ["redis://localhost:1/0", "mooncake://localhost:1"])
def test_a_missing_extra_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    extra = url.partition(":")[0]
    with pytest.raises(ConfigError, match=rf"pip install 'moestro\[{extra}\]'"):
        open_store(url, digest=DIGEST, capacity_bytes=0)


@pytest.mark.parametrize("path", ["/x", "/0/1", "/-1", "/0?ssl=1", "/\u0663"])
def test_a_redis_database_is_a_number(path: str) -> None:
    with pytest.raises(ConfigError, match="a number"):
        open_store(f"redis://localhost:1{path}", digest=DIGEST, capacity_bytes=0)


def test_a_password_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        split_url("redis://me:s3cret@host:port/0")
    assert "s3cret" not in str(caught.value)
    assert "me:***@host" in str(caught.value)
