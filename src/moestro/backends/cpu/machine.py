"""What this machine can do at best: reading memory, and each kind of product."""

import os
from ctypes import c_double
from typing import Literal

from moestro.backends.cpu import library

Kind = Literal["fp32", "bf16", "int8"]
KINDS: tuple[Kind, ...] = ("fp32", "bf16", "int8")

_CACHES = 4
"""A buffer of so many times the last cache is read from memory, whatever stays in the cache."""


def read_rates(buffer_bytes: int, runs: int) -> list[float]:
    """Bytes a second that all threads read together, each its own part of a new buffer, run by run.

    Raises MemoryError, or UnsupportedError without a kernel library.
    """
    native, rates = library.native(), (c_double * runs)()
    status = native.read_rates(buffer_bytes, runs, rates)
    if status:
        native.fail(status)
    return list(rates)


def peak_rates(kind: Kind, seconds: float, runs: int) -> list[float] | None:
    """Operations a second of all threads on registers alone; a multiply-add is two.

    seconds: of one run. None where the level in use has no instruction for this kind. Raises
    UnsupportedError without a kernel library.
    """
    native, rates = library.native(), (c_double * runs)()
    if native.peak_rates(KINDS.index(kind), seconds, runs, rates):
        return None
    return list(rates)


def region_seconds(regions: int, tasks: int, work: int) -> float:
    """Time of parallel regions of so many tasks, each of which counts to `work`."""
    return float(library.native().time_regions(regions, tasks, work))


def read_buffer_bytes(available_bytes: int) -> int:
    """A size that no cache holds: at least 512 MiB, at most a quarter of the memory available."""
    names = getattr(os, "sysconf_names", {})
    cache = os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in names else 0
    return min(max(2**29, _CACHES * cache), max(2**24, available_bytes // 4))
