"""What the control groups of this process allow, version 1 and 2, from files alone.

Limits of every ancestor apply, so all are read. A container may see only its own part of the
tree while /proc names a path on the host; groups that can't be seen are skipped.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """Tightest limits found; None where there is none. cpus may be a fraction.

    memory_left_bytes: what may still be used, reclaimable file cache counted as free.
    """

    memory_bytes: int | None = None
    memory_left_bytes: int | None = None
    cpus: float | None = None


@dataclass(frozen=True, slots=True)
class _MemoryFiles:
    """File names of one version of the memory controller."""

    limit: str
    usage: str
    cache: str


_V2_MEMORY = _MemoryFiles("memory.max", "memory.current", "inactive_file")
_V1_MEMORY = _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
# Version 1 spells "no limit" as the largest page-aligned number.
_UNLIMITED_BYTES = 2**62


def read_cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """Limits of this process; `root` stands for / in tests. Unreadable files mean no limit."""
    mount = root / "sys/fs/cgroup"
    paths = _own_groups(root / "proc/self/cgroup")
    memory: list[tuple[int, int]] = []
    cpus: list[float] = []
    for group in _ancestors(mount, paths.get("")):
        memory += _memory_limit(group, _V2_MEMORY)
        cpus += _cpu_max(group)
    for group in _ancestors(mount / "memory", paths.get("memory")):
        memory += _memory_limit(group, _V1_MEMORY)
    for name in ("cpu", "cpu,cpuacct"):
        for group in _ancestors(mount / name, paths.get("cpu")):
            cpus += _cpu_quota(group)
    return CgroupLimits(
        memory_bytes=min((limit for limit, _ in memory), default=None),
        memory_left_bytes=min((left for _, left in memory), default=None),
        cpus=min(cpus, default=None),
    )


def _own_groups(path: Path) -> dict[str, str]:
    """Controller to path of this process; version 2's path stands under ""."""
    groups: dict[str, str] = {}
    for line in _text(path).splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                groups[controller] = parts[2]
    return groups


def _ancestors(mount: Path, own: str | None) -> list[Path]:
    """The group's folder and every folder above it up to the mount point, those that exist."""
    relative = PurePosixPath((own or "/").lstrip("/"))
    folders = [mount / relative, *(mount / parent for parent in relative.parents)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _memory_limit(group: Path, names: _MemoryFiles) -> list[tuple[int, int]]:
    """[(limit, left)] of one group, or [] without a limit."""
    limit = _integer(group / names.limit)
    if limit is None or limit >= _UNLIMITED_BYTES:
        return []
    used = _integer(group / names.usage) or 0
    cache = 0
    for line in _text(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == names.cache and value.strip().isdigit():
            cache = int(value)
    return [(limit, max(0, limit - max(0, used - cache)))]


def _cpu_max(group: Path) -> list[float]:
    """Version 2: "QUOTA PERIOD" or "max PERIOD"."""
    parts = _text(group / "cpu.max").split()
    if len(parts) == 2 and all(part.isdigit() for part in parts) and int(parts[1]):
        return [int(parts[0]) / int(parts[1])]
    return []


def _cpu_quota(group: Path) -> list[float]:
    """Version 1: two files; a quota of -1 is none."""
    quota = _integer(group / "cpu.cfs_quota_us")
    period = _integer(group / "cpu.cfs_period_us")
    return [quota / period] if quota and quota > 0 and period else []


def _integer(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.removeprefix("-").isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
