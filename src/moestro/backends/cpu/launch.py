"""The one way from Python into a kernel: an op's code and its argument struct.

Everything on the hot path goes through `launch`, so a step can be captured: the calls it made,
with the memory they point to, are the step.
"""

import ctypes
from ctypes import byref

import torch

from moestro.backends.cpu import capture
from moestro.backends.cpu.library import native

_LIBRARY = native()
_launch = _LIBRARY.launch


class Kernel:
    """An op of the native library, by its name in arguments.ARGUMENTS."""

    __slots__ = ("code", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.code: int = _LIBRARY.op_code(name.encode())


def launch(kernel: Kernel, arguments: ctypes.Structure, *tensors: torch.Tensor) -> None:
    """Run a kernel. tensors: all whose memory the arguments point to.

    Raises ValueError (an id, slot or page out of range), MemoryError or UnsupportedError.
    """
    status = _launch(kernel.code, byref(arguments))
    if status:
        _LIBRARY.fail(status)
    if (recorder := capture.current()) is not None:
        recorder.record(kernel.code, arguments, tensors)
