"""Finds, checks and loads the native kernel library, and chooses its ISA level.

The library is plain C over raw pointers: it depends neither on torch's nor on Python's ABI.
"""

import ctypes
import functools
import logging
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from ctypes import c_char_p, c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moestro import envs
from moestro.backends.cpu.arguments import ARGUMENTS
from moestro.errors import ConfigError, UnsupportedError

logger = logging.getLogger(__name__)

FILE_NAME = "libmoestro_cpu.so"
ABI_VERSION = 3
NUMERICS_VERSION = 3
"""Raised with every change of a kernel's bits: it is part of the device's identity."""
LEVELS = ("amx", "avx512", "avx2", "portable")
"""Best first; `auto` takes the first one the machine runs."""
EMULATED = "amx-emulated"
"""The amx kernels with the tile unit in software, in builds for tests; `auto` never takes it."""

_OK, _BAD_DTYPE, _BAD_SHAPE, _OUT_OF_RANGE, _NO_MEMORY = range(5)
_P, _I, _N = c_void_p, c_int32, c_int64
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "moestro_abi_version": (_I, []),
    "moestro_op_code": (_I, [c_char_p]),
    "moestro_args_size": (_N, [_I]),
    "moestro_launch": (_I, [_I, _P]),
    "moestro_graph_new": (_P, []),
    "moestro_graph_free": (None, [_P]),
    "moestro_graph_append": (_I, [_P, _I, _P]),
    "moestro_graph_size": (_N, [_P]),
    "moestro_graph_current": (_I, [_P]),
    "moestro_graph_replay": (_I, [_P]),
    "moestro_graph_time": (_I, [_P, _P]),
    "moestro_graph_call": (_I, [_P, _N, _P]),
    "moestro_packed_bytes": (_N, [_P]),
    "moestro_last_error": (c_char_p, []),
    "moestro_has_level": (_I, [c_char_p]),
    "moestro_use_level": (_I, [c_char_p]),
    "moestro_level": (c_char_p, []),
    "moestro_set_num_threads": (_I, [_I]),
    "moestro_oversubscribe": (None, [_I]),
    "moestro_num_threads": (_I, []),
    "moestro_release_scratch": (None, []),
    "moestro_read_rates": (_I, [_N, _I, _P]),
    "moestro_peak_rates": (_I, [_I, c_double, _I, _P]),
    "moestro_time_regions": (c_double, [_N, _N, _N]),
}


@dataclass(frozen=True, slots=True)
class LibraryStatus:
    """What serves the CPU's ops. isa: a level, or reference with the reason why."""

    path: Path | None
    isa: str
    available_isas: tuple[str, ...]
    reason: str


class Library:
    """The loaded library; attributes are its functions without the `moestro_` prefix."""

    def __init__(self, path: Path) -> None:
        self.path = path
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("moestro_"), function)
        self._check()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"{self.path} has no function moestro_{name}")

    def _check(self) -> None:
        found = self.abi_version()
        if found != ABI_VERSION:
            raise OSError(f"its ABI is version {found}, this package needs {ABI_VERSION}")
        for op, struct in ARGUMENTS.items():
            size = self.args_size(self.op_code(op.encode()))
            if size != ctypes.sizeof(struct):
                raise OSError(f"its op {op} takes {size} bytes, not {ctypes.sizeof(struct)}")

    def levels(self) -> tuple[str, ...]:
        """The levels this build has and this machine runs, best first."""
        return tuple(level for level in (*LEVELS, EMULATED) if self.has_level(level.encode()))

    @contextmanager
    def at_level(self, level: str) -> Iterator[None]:
        """Run with another level for a while: for tests, while no other thread computes."""
        before = self.level()
        if self.use_level(level.encode()):
            raise ConfigError(f"this machine does not run level {level}")
        try:
            yield
        finally:
            self.use_level(before)

    def fail(self, status: int) -> None:
        """Raise what a function's non-zero status means."""
        message = self.last_error().decode()
        if status == _OUT_OF_RANGE:
            raise ValueError(message)
        if status == _NO_MEMORY:
            raise MemoryError(message)
        raise UnsupportedError(message)


def find_library(folders: Iterable[str]) -> Path | None:
    """The library in the first of the package's folders that holds it."""
    for folder in folders:
        path = Path(folder) / FILE_NAME
        if path.is_file():
            return path
    return None


def open_library(path: Path | None, wanted: str) -> tuple[Library | None, LibraryStatus]:
    """Load the library at `path` and set the level `wanted` (auto, reference or one of LEVELS).

    Without a usable library the status says why, and the reference serves; asking for a level
    that is not there raises ConfigError.
    """
    library, reason = None, "no kernel library was built (no C++ compiler at installation)"
    if path is not None:
        try:
            library, reason = Library(path), ""
        except (OSError, AttributeError) as error:
            reason = f"the kernel library {path} can't be used: {error}"
    levels = () if library is None else library.levels()
    if wanted == "reference":
        return None, LibraryStatus(path, "reference", levels, "MOESTRO_CPU_ISA=reference")
    if wanted == "auto" and library is None:
        return None, LibraryStatus(path, "reference", levels, reason)
    level = levels[0] if wanted == "auto" else wanted
    if library is None or level not in levels:
        has = ", ".join((*levels, "reference"))
        raise ConfigError(
            f"MOESTRO_CPU_ISA={wanted}, but {reason or 'this machine does not run that level'}; "
            f"it has: {has}. Choose one of these or auto."
        )
    library.use_level(level.encode())
    return library, LibraryStatus(path, level, levels, "")


@functools.cache
def _loaded() -> tuple[Library | None, LibraryStatus]:
    import moestro.backends.cpu as package

    library, state = open_library(find_library(package.__path__), envs.CPU_ISA.get())
    if library is None and envs.CPU_ISA.get() == "auto":
        logger.warning("CPU kernels are off: %s. The slower reference bodies serve.", state.reason)
    if state.isa == "portable" and envs.CPU_ISA.get() == "auto" and _is_x86():
        logger.warning(
            "The slower portable kernels serve: this processor, or this build, has no AVX2."
        )
    return library, state


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64", "i686")


def status() -> LibraryStatus:
    """What serves the CPU's ops, decided at the first call in this process."""
    return _loaded()[1]


def has_native() -> bool:
    """True when native kernels serve."""
    return _loaded()[0] is not None


def native() -> Library:
    """The library in use. Raises UnsupportedError where the reference serves."""
    library, state = _loaded()
    if library is None:
        raise UnsupportedError(f"no CPU kernel library is in use: {state.reason}")
    return library


def identity() -> str:
    """The CPU's device identity, as "cpu-avx512-v3"; see backends.base.Device.

    Where the references serve, torch makes the bits: its version and vector level are named too.
    """
    named = f"cpu-{status().isa}-v{NUMERICS_VERSION}"
    if has_native():
        return named
    return f"{named}-torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
