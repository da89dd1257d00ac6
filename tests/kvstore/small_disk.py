"""A small file system of a test's own."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[None]:
    """A file system of its own; skips where mounting isn't allowed."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
