"""HardwareSpec: what the machine is, as far as planning needs it."""

from dataclasses import dataclass


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
