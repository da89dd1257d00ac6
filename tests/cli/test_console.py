"""What is written to stdout arrives whole, or the command fails."""

import errno
import io
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from moestro.cli.console import note, print_json, write_text


class Unbuffered(io.RawIOBase):
    """stdout under python -u: a write takes what there is room for."""

    def __init__(self, room: int) -> None:
        self.taken = bytearray()
        self.room = room

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        part = bytes(data)[: min(7, self.room - len(self.taken))]
        if not part:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.taken += part
        return len(part)


def stdout(room: int, monkeypatch: pytest.MonkeyPatch, encoding: str = "utf-8") -> Unbuffered:
    raw = Unbuffered(room)
    stream = io.TextIOWrapper(raw, encoding, write_through=True)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stdout", stream)
    return raw


def test_partial_writes_are_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = stdout(10_000, monkeypatch)
    print_json({"text": "x" * 1000})
    write_text("y" * 1000)
    told = raw.taken.decode()
    assert json.loads(told[: told.index("}") + 1]) == {"text": "x" * 1000}
    assert told.endswith("y" * 1000)


@pytest.mark.parametrize("write", [print_json, write_text])
def test_a_disk_that_fills_up_is_an_error(
    write: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdout(100, monkeypatch)
    with pytest.raises(OSError, match="No space"):
        write("x" * 1000)


def test_what_the_terminal_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = stdout(1000, monkeypatch, "ascii")
    write_text("a\xe9\u20ac\udcff")
    assert raw.taken == b"a\\xe9\\u20ac\\udcff"
    raw = stdout(1000, monkeypatch)
    write_text("a\xe9\udcff")
    assert raw.taken.decode() == "a\xe9\\udcff"


def test_a_stream_without_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(sys, "stdout", text)
    write_text("a\xe9")
    print_json([1])
    assert text.getvalue() == "a\xe9[\n  1\n]\n"


def test_notes_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(Unbuffered(0), write_through=True)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stderr", stream)
    note("never read")
