"""Captured steps on the CPU: a native list of kernel calls, replayed in one call."""

import ctypes
from collections.abc import Callable
from ctypes import byref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moestro.backends.cpu import capture
from moestro.backends.cpu.arena import Arena
from moestro.backends.cpu.arguments import ARGUMENTS
from moestro.backends.cpu.library import Library, native
from moestro.errors import UnsupportedError

METADATA_OPS = frozenset(
    f"aten.{name}"
    for name in (
        *("alias", "as_strided", "detach", "empty.memory_format", "expand", "permute", "select"),
        *("slice", "split", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"),
        *("_unsafe_view", "_reshape_alias", "lift_fresh", "empty_strided", "detach_"),
    )
)
"""torch ops that read and write no element: a step may use them and still be captured whole."""


class CapturedStep:
    """A step of kernel calls over fixed memory. result: what the step returned.

    Valid until the next step of the same GraphPool is replayed, which uses the same memory.
    """

    def __init__(self, library: Library, arena: Arena) -> None:
        self._library = library
        self._arena = arena
        self._graph: int | None = library.graph_new()
        if self._graph is None:
            raise MemoryError("no memory for a graph")
        self._held: list[torch.Tensor] = []
        self.result: Any = None
        self.new_empty = arena.allocator()
        self._replay = library.graph_replay

    def record(
        self, code: int, arguments: ctypes.Structure, tensors: tuple[torch.Tensor, ...]
    ) -> None:
        """One more call. Tensors outside the arena are kept alive, those inside are not."""
        status = self._library.graph_append(self._graph, code, byref(arguments))
        if status:
            self._library.fail(status)
        self._held += (t for t in tensors if not self._arena.holds(t))

    @property
    def num_calls(self) -> int:
        """Kernel calls of one replay."""
        return int(self._library.graph_size(self._graph))

    def is_current(self) -> bool:
        """False once the kernel level or the number of threads has changed: capture anew."""
        return bool(self._library.graph_current(self._graph))

    def replay(self) -> None:
        """Make every call again. Raises what launch raises, with the call's index."""
        status = self._replay(self._graph)
        if status:
            self._library.fail(status)

    def timed_replay(self) -> list[float]:
        """Make every call again; the seconds that each took."""
        seconds = (ctypes.c_double * self.num_calls)()
        status = self._library.graph_time(self._graph, seconds)
        if status:
            self._library.fail(status)
        return list(seconds)

    def calls(self) -> list[tuple[str, ctypes.Structure]]:
        """The op and the arguments of every call, as they lie in the list."""
        names = {self._library.op_code(name.encode()): name for name in ARGUMENTS}
        told, at = [], ctypes.c_void_p()
        for index in range(self.num_calls):
            name = names[self._library.graph_call(self._graph, index, byref(at))]
            assert at.value is not None
            told.append((name, ARGUMENTS[name].from_address(at.value)))
        return told

    def close(self) -> None:
        """Give everything back. Idempotent."""
        if self._graph is not None:
            self._library.graph_free(self._graph)
        self._graph, self.result = None, None
        self._held.clear()

    def __del__(self) -> None:
        self.close()


class GraphPool:
    """See backends.base.GraphPool."""

    def __init__(self) -> None:
        self._library = native()
        self._arena = Arena()

    @property
    def num_bytes(self) -> int:
        return self._arena.num_bytes

    def apart(self) -> "GraphPool":
        return GraphPool()

    def capture(self, step: Callable[[], Any]) -> CapturedStep:
        """Run `step` and keep its calls. Raises UnsupportedError when torch computes a part."""
        captured = CapturedStep(self._library, self._arena)
        capture.begin(captured)
        try:
            with TorchOps(_refuse):
                captured.result = step()
        finally:
            capture.end()
        return captured


class TorchOps(TorchDispatchMode):
    """Hears of every torch op that computes, and hands it to `told`.

    Ops that only make, name or describe tensors are left alone; composite ones, which inference
    mode hands over whole, are looked into.
    """

    def __init__(self, told: Callable[[str], None]) -> None:
        super().__init__()
        self._told = told

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # To be skipped by the compiler imports it, a second of every start. Nothing compiles here.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_metadata_op(func):
            with self:
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
            self._told(str(func))
        return func(*args, **(kwargs or {}))


def _refuse(op: str) -> None:
    raise UnsupportedError(
        f"this step can't be captured: torch computes {op} in it, which would be missing from the "
        "replay."
    )


def _is_metadata_op(func: Any) -> bool:
    name = str(func)
    return name in METADATA_OPS or name.rpartition(".")[0] in METADATA_OPS
