"""HardwareSpec: what the machine is, as far as planning needs it, and how a CPU is probed."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from moestro.core.cgroup import read_cgroup_limits


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """One rank's machine. Byte counts are what the process may use (cgroup limits applied)."""

    device: str
    """cpu, cuda or npu"""
    name: str
    memory_bytes: int
    available_bytes: int
    num_threads: int
    isa: str
    """kernel level in use: avx512, avx2, portable, or reference when no kernel library exists"""


def probe_cpu(isa: str = "unknown", *, root: Path = Path("/")) -> HardwareSpec:
    """The CPU and memory this process may use now; `root` stands for / in tests.

    num_threads: CPUs of the affinity mask, at most the cgroup's whole CPUs, at least 1.
    available_bytes: the least of the system's free memory, what the cgroup leaves, and what is
    left of the address space (ulimit -v); where the system tells no free memory it is taken to
    be all free.
    """
    total, free = _memory(root / "proc/meminfo")
    limits = read_cgroup_limits(root)
    if limits.memory_bytes is not None:
        total = min(total, limits.memory_bytes)
    if limits.memory_left_bytes is not None:
        free = min(free, limits.memory_left_bytes)
    addresses_left = _address_space_left(root)
    if addresses_left is not None:
        free = min(free, addresses_left)
    threads = num_cpus_in_affinity()
    if limits.cpus is not None:
        threads = min(threads, max(1, int(limits.cpus)))
    return HardwareSpec(
        device="cpu",
        name=_cpu_name(root / "proc/cpuinfo"),
        memory_bytes=total,
        available_bytes=min(total, free),
        num_threads=threads,
        isa=isa,
    )


def num_cpus_in_affinity() -> int:
    """CPUs of this process's affinity mask; all of them where there is none."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def _memory(meminfo: Path) -> tuple[int, int]:
    """Total and free bytes. File cache that can be dropped counts as free."""
    sizes = {}
    for line in _lines(meminfo):
        name, _, rest = line.partition(":")
        amount = rest.split()
        if amount and amount[0].isdigit():
            sizes[name] = int(amount[0]) * 1024
    total = sizes.get("MemTotal") or _sysconf_memory()
    return total, sizes.get("MemAvailable", sizes.get("MemFree", total))


def _address_space_left(root: Path) -> int | None:
    """Bytes this process may still map; None without a limit."""
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    mapped = " ".join(_lines(root / "proc/self/statm")).split()
    used = int(mapped[0]) * resource.getpagesize() if mapped and mapped[0].isdigit() else 0
    return max(0, limit - used)


def _sysconf_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0


def _cpu_name(cpuinfo: Path) -> str:
    for line in _lines(cpuinfo):
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "CPU"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
