"""cgroup limits of both versions, from files laid out as the kernel does."""

from pathlib import Path

from moestro.core.cgroup import CgroupLimits, read_cgroup_limits

GIB = 2**30


def lay(root: Path, **files: str) -> None:
    """Write files under root; __ in a keyword stands for /, ___ for a dot."""
    for name, text in files.items():
        path = root / name.replace("___", ".").replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_nothing_there(tmp_path: Path) -> None:
    assert read_cgroup_limits(tmp_path) == CgroupLimits()


def test_version_2_with_a_namespace(tmp_path: Path) -> None:
    lay(
        tmp_path,
        proc__self__cgroup="0::/\n",
        sys__fs__cgroup__memory___max=f"{4 * GIB}\n",
        sys__fs__cgroup__memory___current=f"{3 * GIB}\n",
        sys__fs__cgroup__memory___stat=f"anon 5\nactive_file 7\ninactive_file {GIB}\n",
        sys__fs__cgroup__cpu___max="150000 100000\n",
    )
    assert read_cgroup_limits(tmp_path) == CgroupLimits(4 * GIB, 2 * GIB, 1.5)


def test_version_2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    lay(
        tmp_path,
        proc__self__cgroup="0::/a/b\n",
        sys__fs__cgroup__a__b__memory___max="max\n",
        sys__fs__cgroup__a__b__cpu___max="max 100000\n",
        sys__fs__cgroup__a__memory___max=f"{2 * GIB}\n",
        sys__fs__cgroup__a__memory___current=f"{GIB}\n",
        sys__fs__cgroup__a__cpu___max="50000 100000\n",
    )
    assert read_cgroup_limits(tmp_path) == CgroupLimits(2 * GIB, GIB, 0.5)


def test_a_path_of_the_host_falls_back_to_the_mount(tmp_path: Path) -> None:
    lay(
        tmp_path,
        proc__self__cgroup="0::/docker/0123\n",
        sys__fs__cgroup__memory___max=f"{GIB}\n",
        sys__fs__cgroup__memory___current="0\n",
    )
    assert read_cgroup_limits(tmp_path) == CgroupLimits(GIB, GIB, None)


def test_version_1(tmp_path: Path) -> None:
    lay(
        tmp_path,
        proc__self__cgroup="9:memory:/job\n4:cpu,cpuacct:/job\n1:name=systemd:/\n",
        sys__fs__cgroup__memory__job__memory___limit_in_bytes=f"{8 * GIB}\n",
        sys__fs__cgroup__memory__job__memory___usage_in_bytes=f"{3 * GIB}\n",
        sys__fs__cgroup__memory__job__memory___stat=f"cache 9\ntotal_inactive_file {GIB}\n",
        sys__fs__cgroup__memory__memory___limit_in_bytes="9223372036854771712\n",
        sys__fs__cgroup__cpu__job__cpu___cfs_quota_us="400000\n",
        sys__fs__cgroup__cpu__job__cpu___cfs_period_us="100000\n",
    )
    assert read_cgroup_limits(tmp_path) == CgroupLimits(8 * GIB, 6 * GIB, 4.0)


def test_version_1_without_limits(tmp_path: Path) -> None:
    lay(
        tmp_path,
        proc__self__cgroup="9:memory:/\n4:cpu:/\n",
        sys__fs__cgroup__memory__memory___limit_in_bytes="9223372036854771712\n",
        sys__fs__cgroup__cpu__cpu___cfs_quota_us="-1\n",
        sys__fs__cgroup__cpu__cpu___cfs_period_us="100000\n",
    )
    assert read_cgroup_limits(tmp_path) == CgroupLimits()


def test_usage_above_the_limit_leaves_nothing(tmp_path: Path) -> None:
    lay(
        tmp_path,
        proc__self__cgroup="0::/\n",
        sys__fs__cgroup__memory___max="1000\n",
        sys__fs__cgroup__memory___current="2000\n",
    )
    assert read_cgroup_limits(tmp_path).memory_left_bytes == 0


def test_garbage_is_no_limit(tmp_path: Path) -> None:
    lay(
        tmp_path,
        proc__self__cgroup="what is this\n::\n0::\n",
        sys__fs__cgroup__memory___max="lots\n",
        sys__fs__cgroup__cpu___max="1 0\n",
    )
    assert read_cgroup_limits(tmp_path) == CgroupLimits()
