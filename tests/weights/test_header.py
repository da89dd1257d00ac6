"""Nothing in a safetensors header is trusted before it is checked."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from moestro.errors import CheckpointError
from moestro.weights.header import MAX_HEADER_BYTES, read_header


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(start: int, stop: int, dtype: str = "U8", shape: list[Any] | None = None) -> Any:
    shape = [stop - start] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "b": torch.zeros(3, 2, dtype=torch.bfloat16),
        "a": torch.zeros((), dtype=torch.float32),
        "none": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    entries = {e.name: e for e in read_header(tmp_path / "m.safetensors")}
    assert {n: (e.dtype, e.shape, e.num_bytes) for n, e in entries.items()} == {
        "b": ("BF16", (3, 2), 12),
        "a": ("F32", (), 4),
        "none": ("F32", (0, 4), 0),
    }


BAD = {
    "not an object": ([1], b""),
    "no valid JSON": (b'{"a": ', b""),
    "can't decode byte": (b"\xff\xfe{}", b""),
    "names 'a' twice": (b'{"a": 1, "a": 2}', b""),
    "lacks dtype, shape or data_offsets": ({"a": {"dtype": "U8"}}, b""),
    "unknown dtype 'F13'": ({"a": entry(0, 1, "F13")}, b"x"),
    "unknown dtype \\['U8'\\]": ({"a": {**entry(0, 1), "dtype": ["U8"]}}, b"x"),
    "impossible shape \\[-1\\]": ({"a": entry(0, 1, shape=[-1])}, b"x"),
    "impossible shape \\[True\\]": ({"a": entry(0, 1, shape=[True])}, b"x"),
    "impossible shape \\[1.0\\]": ({"a": entry(0, 1, shape=[1.0])}, b"x"),
    "impossible data_offsets \\[2, 1\\]": ({"a": entry(2, 1, shape=[1])}, b"xx"),
    "impossible data_offsets \\[-1, 0\\]": ({"a": entry(-1, 0, shape=[1])}, b"xx"),
    "needs 8 bytes": ({"a": entry(0, 4, "F32", [2])}, b"xxxx"),
    "needs \\d{38} bytes": ({"a": entry(0, 4, "U8", [2**62, 2**62])}, b"xxxx"),
    "impossible shape \\[1, 1, 1": ({"a": entry(0, 1, shape=[1] * 99)}, b"x"),
    "impossible shape \\[99999": ({"a": entry(0, 1, shape=[10**4000 - 1])}, b"x"),
    "'a' and 'b' overlap": ({"a": entry(0, 4), "b": entry(2, 6)}, b"x" * 6),
    "2 bytes before tensor 'b'": ({"a": entry(0, 2), "b": entry(4, 6)}, b"x" * 6),
    "truncated, or still being written": ({"a": entry(0, 6)}, b"x" * 5),
    "2 bytes after the last tensor": ({"a": entry(0, 6)}, b"x" * 8),
}


@pytest.mark.parametrize("reason", BAD)
def test_bad_headers_are_refused(reason: str, tmp_path: Path) -> None:
    header, data = BAD[reason]
    path = write(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError, match=f"bad\\.safetensors.*({reason})"):
        read_header(path)


def test_absurd_lengths(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for content, reason in (
        (b"", "0 bytes long"),
        (b"\x01\x00", "2 bytes long"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1), "above the format's limit"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "above the format's limit"),
        (struct.pack("<Q", 1000) + b"{}", "truncated"),
        (b"<!DOCTYPE html><html>", "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:12", "git lfs pull"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=reason):
            read_header(path)


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no regular file"):
        read_header(tmp_path)
    with pytest.raises(CheckpointError, match="can't be read"):
        read_header(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    with pytest.raises(CheckpointError, match="no regular file"):
        read_header(tmp_path / "pipe")


@given(data=st.data())
def test_damaged_files_never_escape(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Any flipped byte or cut of a valid file is read as valid or refused, never a crash."""
    folder = tmp_path_factory.getbasetemp()
    path = folder / "fuzz.safetensors"
    save_file({"a": torch.ones(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}, path)
    raw = bytearray(path.read_bytes())
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    for _ in range(data.draw(st.integers(0, 3))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        entries = read_header(path)
    except CheckpointError:
        return
    assert all(0 <= e.start <= e.stop <= len(raw) for e in entries)
