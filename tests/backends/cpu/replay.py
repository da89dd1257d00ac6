"""Kernel calls as files: recorded here, repeated by replay_driver.cpp on another processor."""

import ctypes
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from moestro.backends.cpu import launch as launching


@dataclass(frozen=True, slots=True)
class Call:
    """One launch. before, after: the bytes of each buffer, a tensor's whole storage.

    pointers: (offset in args, buffer, offset in the buffer). dtypes: one that a buffer is read as.
    """

    op: str
    args: bytes
    pointers: tuple[tuple[int, int, int], ...]
    dtypes: tuple[torch.dtype, ...]
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]


@contextmanager
def recording(calls: list[Call]) -> Iterator[None]:
    """Every launch while the block runs is done and appended to `calls`."""
    original = launching.launch

    def launch(
        kernel: launching.Kernel, arguments: ctypes.Structure, *tensors: torch.Tensor
    ) -> None:
        storages = {t.untyped_storage().data_ptr(): t for t in tensors if t.untyped_storage()}
        before = tuple(_storage_bytes(t) for t in storages.values())
        original(kernel, arguments, *tensors)
        pointers = tuple(_pointers(arguments, list(storages.values())))
        args = bytearray(arguments)
        for offset, _, _ in pointers:
            args[offset : offset + 8] = bytes(8)
        dtypes = tuple(t.dtype for t in storages.values())
        after = tuple(_storage_bytes(t) for t in storages.values())
        calls.append(Call(kernel.name, bytes(args), pointers, dtypes, before, after))

    users = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("moestro.backends.cpu.") and vars(module).get("launch") is original
    ]
    for module in users:
        module.launch = launch  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in users:
            module.launch = original  # type: ignore[attr-defined]


def _storage_bytes(tensor: torch.Tensor) -> bytes:
    storage = tensor.untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


def _pointers(
    arguments: ctypes.Structure, tensors: list[torch.Tensor]
) -> Iterator[tuple[int, int, int]]:
    for at, address, name in _addresses(arguments):
        for which, tensor in enumerate(tensors):
            storage = tensor.untyped_storage()
            offset = address - storage.data_ptr()
            if 0 <= offset < storage.nbytes():
                yield at, which, offset
                break
        else:
            raise AssertionError(f"{name} points to memory of no tensor given to launch")


def _addresses(arguments: ctypes.Structure) -> Iterator[tuple[int, int, str]]:
    """Pointers that are not null, those of structs inside too: offset, value, name."""
    for name, kind in arguments._fields_:  # type: ignore[misc]
        value, at = getattr(arguments, name), getattr(type(arguments), name).offset
        where = f"{type(arguments).__name__}.{name}"
        if isinstance(value, ctypes.Structure):
            yield from ((at + inner, *rest) for inner, *rest in _addresses(value))
        elif kind is ctypes.c_void_p and value is not None:
            yield at, value, where
        else:
            assert not issubclass(kind, ctypes.Array), f"{where}: arrays are not looked into"


def write_calls(path: Path, calls: list[Call]) -> None:
    """The file that replay_driver.cpp describes."""
    with path.open("wb") as file:

        def put(*values: int) -> None:
            file.write(struct.pack(f"<{len(values)}q", *values))

        put(len(calls))
        for call in calls:
            for text in (call.op.encode(), call.args):
                put(len(text))
                file.write(text)
            put(len(call.before))
            for data in call.before:
                put(len(data))
                file.write(data)
            put(len(call.pointers))
            for pointer in call.pointers:
                put(*pointer)


def read_results(path: Path, calls: list[Call]) -> Iterator[tuple[Call, int, list[bytes]]]:
    """Each call with its status there and its buffers as it left them there."""
    with path.open("rb") as file:
        for call in calls:
            (status,) = struct.unpack("<q", file.read(8))
            yield call, status, [file.read(len(data)) for data in call.before]
        assert file.read() == b""
