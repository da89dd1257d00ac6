"""What a CPU is said to have: limits applied, and honest numbers when files are missing."""

import os
import resource
from pathlib import Path

import pytest

from moestro.core.hardware import probe_cpu

MEMINFO = "MemTotal:       8000000 kB\nMemFree:  1000000 kB\nMemAvailable:    6000000 kB\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: Grand CPU\n")
    return tmp_path


def test_without_limits(root: Path) -> None:
    found = probe_cpu("avx2", root=root)
    assert (found.device, found.name, found.isa) == ("cpu", "Grand CPU", "avx2")
    assert found.memory_bytes == 8_000_000 * 1024
    assert found.available_bytes == 6_000_000 * 1024
    assert found.num_threads == 8


def test_with_a_cgroup(root: Path) -> None:
    group = root / "sys/fs/cgroup"
    (group / "memory.max").write_text("1000000000\n")
    (group / "memory.current").write_text("400000000\n")
    (group / "cpu.max").write_text("350000 100000\n")
    found = probe_cpu(root=root)
    assert (found.memory_bytes, found.available_bytes) == (10**9, 600_000_000)
    assert found.num_threads == 3
    (group / "cpu.max").write_text("20000 100000\n")
    assert probe_cpu(root=root).num_threads == 1


def test_a_limit_on_the_address_space(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10**9, 2 * 10**9))
    (root / "proc/self/statm").write_text("1000 500 100 1 0 100 0\n")
    used = 1000 * resource.getpagesize()
    assert probe_cpu(root=root).available_bytes == 10**9 - used
    (root / "proc/self/statm").write_text("999999999 500 100 1 0 100 0\n")
    assert probe_cpu(root=root).available_bytes == 0
    (root / "proc/self/statm").unlink()
    assert probe_cpu(root=root).available_bytes == 10**9


def test_a_generous_cgroup_does_not_add_memory(root: Path) -> None:
    (root / "sys/fs/cgroup/memory.max").write_text(f"{2**50}\n")
    (root / "sys/fs/cgroup/cpu.max").write_text("10000000 100000\n")
    found = probe_cpu(root=root)
    assert found.available_bytes == 6_000_000 * 1024
    assert found.num_threads == 8


def test_old_kernel_without_mem_available(root: Path) -> None:
    (root / "proc/meminfo").write_text("MemTotal: 8000000 kB\nMemFree: 1000000 kB\n")
    assert probe_cpu(root=root).available_bytes == 1_000_000 * 1024


def test_missing_files(tmp_path: Path) -> None:
    found = probe_cpu(root=tmp_path)
    assert found.memory_bytes == found.available_bytes
    assert found.memory_bytes > 0  # from sysconf
    assert found.num_threads >= 1
    assert found.name


def test_this_machine() -> None:
    found = probe_cpu()
    assert 0 < found.available_bytes <= found.memory_bytes
    assert 1 <= found.num_threads <= (os.cpu_count() or 1)
