"""Facts about this machine and these versions, for `doctor` and beside every measurement."""

import importlib.metadata
import os
import platform
from typing import Any

from moestro import __version__
from moestro.core.cgroup import read_cgroup_limits
from moestro.core.hardware import num_cpus_in_affinity, probe_cpu

LIBRARIES = ("torch", "numpy", "tokenizers", "fastapi", "uvicorn")


def machine_facts() -> dict[str, Any]:
    """CPU, cores and memory, with what affinity and cgroup leave of them. Sizes in bytes."""
    hardware = probe_cpu()
    limits = read_cgroup_limits()
    return {
        "cpu": hardware.name,
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "num_cpus": os.cpu_count() or 1,
        "num_cpus_in_affinity": num_cpus_in_affinity(),
        "cgroup_cpus": limits.cpus,
        "num_threads": hardware.num_threads,
        "memory_bytes": hardware.memory_bytes,
        "available_bytes": hardware.available_bytes,
        "cgroup_memory_bytes": limits.memory_bytes,
    }


def version_facts() -> dict[str, str]:
    """Versions of Moestro, Python, its libraries and its kernels."""
    libraries = {name: library_version(name) for name in LIBRARIES}
    return {
        "moestro": __version__,
        "python": platform.python_version(),
        **libraries,
        "kernels": str(kernel_facts()["identity"]),
    }


def library_version(name: str) -> str:
    """The installed version, or "missing"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def kernel_facts() -> dict[str, Any]:
    """What serves the CPU's ops: identity (names every bit they give), levels, and why.

    Raises ConfigError when MOESTRO_CPU_ISA asks for a level that is not there.
    """
    from moestro.backends.cpu import library

    state = library.status()
    return {
        "identity": library.identity(),
        "isa": state.isa,
        "available_isas": list(state.available_isas),
        "library": None if state.path is None else str(state.path),
        "reason": state.reason,
    }
