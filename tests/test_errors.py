"""How messages show what somebody else wrote."""

import pytest

from moestro.errors import MAX_SHOWN_CHARS, shown, without_password


def test_short_values_are_told_as_they_print() -> None:
    assert shown("a\n") == "'a\\n'"
    assert shown([1, None]) == "[1, None]"


def test_long_values_are_cut() -> None:
    assert shown("x" * 10_000) == "'" + "x" * (MAX_SHOWN_CHARS - 1) + "..."
    assert shown("x" * (MAX_SHOWN_CHARS - 2)) == repr("x" * (MAX_SHOWN_CHARS - 2))


def test_what_does_not_print_is_told_by_its_type() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(10**10_000) == "<int too large to show>"
    assert shown(deep) == "<list too large to show>"


PASSWORDS = (
    "redis://u:secret@h:6379/0",
    "redis://u:secret/more@h:99999/0",
    "redis://u:secret@more/x@h:1/0",
    "redis://u:secret?x@h/0",
    "redis://u:secret#x@h/0",
    "redis://u:secret x@h/0",
    "redis://u:sec\nret secret@h",
    "redis://u:secret",
    "redis://:secret",
    "redis://u:1/secret",
    "redis://h:1/0?password=secret",
    "redis://u:secret@[h/0",
    "REDIS://u:secret@h",
    "rediss://u:secret@h",
    "redis:/u:secret@h",
    "redis:u:secret@h",
    "redis//u:secret@h",
    ":secret@h",
    "mooncake://m:1?metadata=redis://:secret@h",
)


@pytest.mark.parametrize("url", PASSWORDS)
def test_no_password_is_shown_however_malformed_its_url_is(url: str) -> None:
    assert "secret" not in without_password(url)
    assert "secret" not in shown(without_password(url))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("lmdb:///a@b:c", "lmdb:///a@b:c"),
        ("LMDB:///a", "LMDB:///a"),
        ("none", "none"),
        ("/var/kv", "/var/kv"),
        ("redis://host", "redis://host"),
        ("redis://[::1]:6379/3", "redis://[::1]:6379/3"),
        ("redis://me:pass@word@box:1/2", "redis://***@box:1/2"),
    ],
)
def test_what_can_hold_no_password_is_shown(url: str, expected: str) -> None:
    assert without_password(url) == expected
    assert shown(without_password(url)) == repr(expected)


def test_values_that_quote_a_url_are_shown_without_its_password() -> None:
    assert shown(["redis://u:secret@h"]) == "['redis://***@h']"
    assert shown("lmdb:///a@b") == "'lmdb:///a@b'"
    assert "secret" not in shown(["lmdb:///x", "redis://u:secret@h", "y"])
    assert "secret" not in shown("redis://u:" + "secret" * 1000 + "@h")
    assert len(shown("://" * 1_000_000)) < 300  # and takes no time that grows with its square
