"""The capture that is under way, if any: who records kernel calls and gives out memory.

One at a time in a process, and only for the thread that makes it: an engine in another thread
meanwhile computes as always.
"""

import ctypes
from threading import Lock, get_ident
from typing import Protocol

import torch


class Recorder(Protocol):
    """What launch and new_empty tell."""

    def new_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def record(
        self, code: int, arguments: ctypes.Structure, tensors: tuple[torch.Tensor, ...]
    ) -> None: ...


_lock = Lock()
_recorder: Recorder | None = None
_thread = 0


def current() -> Recorder | None:
    """The recorder of this thread's capture."""
    return None if _recorder is None or _thread != get_ident() else _recorder


def begin(recorder: Recorder) -> None:
    """Let `recorder` hear of this thread's calls until `end`; waits for another thread's."""
    global _recorder, _thread
    _lock.acquire()
    _thread, _recorder = get_ident(), recorder


def end() -> None:
    """The capture is over."""
    global _recorder
    _recorder = None
    _lock.release()
