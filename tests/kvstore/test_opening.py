"""What --kv-store may say, and the answers to what it may not."""

import logging
import os
import traceback
from pathlib import Path

import pytest
from tests.kvstore.small_disk import small_disk
from tests.test_errors import PASSWORDS

from moestro.errors import ConfigError
from moestro.kvstore import open_store
from moestro.kvstore.opening import check_start
from moestro.kvstore.store_url import split_url

DIGEST = bytes(16)


@pytest.mark.parametrize(
    "url",
    ["", "none", "lmdb:", "lmdb://", "/var/kv", "lmdb:/var/kv", "LMDB:///var/kv", "s3://bucket",
     "redis:6379", "redis://host:port/0", "redis://h:0/0", "redis://a..b/0", "redis://h h/0",
     "redis://host:70000/0", "lmdb://[", "file:///x"],
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


@pytest.mark.parametrize("path", ["/x", "/0/1", "/-1", "/0?ssl=1", "/\u0663", "/" + "9" * 5000])
def test_a_redis_database_is_a_number(path: str) -> None:
    with pytest.raises(ConfigError, match="the number of a database"):
        open_store(f"redis://localhost:1{path}", digest=DIGEST, capacity_bytes=0)


@pytest.mark.parametrize("url", PASSWORDS)
def test_a_password_is_not_shown_nor_found_in_a_traceback(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url.replace("@h", "@h:0"), digest=DIGEST, capacity_bytes=0)
    assert "secret" not in str(caught.value)
    assert "secret" not in "".join(traceback.format_exception_only(caught.value))
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or "secret" not in str(caught.value.__context__)


def test_a_password_with_a_slash_is_told_how_to_be_written() -> None:
    with pytest.raises(ConfigError, match=r"kv_store is 'redis://\*\*\*@h:1/0', no URL: .*%2F"):
        split_url("redis://u:se/cret@h:1/0")


def test_folders_that_can_not_be_made_are_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for path, what in (
        ("/proc/moestro", "can't be made"),
        (f"{tmp_path}/file", "is no folder"),
        (f"{tmp_path}/file/below", "is no folder"),
        (f"{tmp_path}/loop/x", "can't be made"),
        (f"{tmp_path}/{'x' * 300}", "can't be made"),
        (f"{tmp_path}/a%00b", "NUL"),
        ("~nobody-at-all/kv", "whole path"),
    ):
        with pytest.raises(ConfigError, match=what) as caught:
            check_start(f"lmdb://{path}", 2**20)
        assert "kv_store" in str(caught.value)


def test_a_read_only_file_system_is_refused_at_start_and_a_full_one_is_not(tmp_path: Path) -> None:
    with small_disk(tmp_path / "ro", "size=1m,ro"), pytest.raises(ConfigError, match="written"):
        check_start(f"lmdb://{tmp_path}/ro/kv", 2**20)
    with small_disk(tmp_path / "full", "size=1m,nr_inodes=1"):
        check_start(f"lmdb://{tmp_path}/full/kv", 2**20)


@pytest.mark.parametrize("num_bytes", [8 * 10**18, 2**63 - 1])
def test_a_budget_beyond_the_address_space(num_bytes: int, tmp_path: Path) -> None:
    for opens in (
        lambda url: check_start(url, num_bytes),
        lambda url: open_store(url, digest=DIGEST, capacity_bytes=num_bytes),
    ):
        with pytest.raises(ConfigError, match=f"kv_store_bytes is {num_bytes:,}.*no more than"):
            opens(f"lmdb://{tmp_path}/kv")
    assert not os.listdir(tmp_path)


def test_a_budget_beyond_the_disk_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_start(f"lmdb://{tmp_path}/kv", 2**20)
        assert not caplog.records
        check_start(f"lmdb://{tmp_path}/kv", 2**46)
    assert f"kv_store_bytes is {2**46:,}, but the disk of" in caplog.text
