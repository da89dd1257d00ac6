"""Peak memory of a process and its children: anonymous and shared pages, not mapped files.

A pid of None is this process.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

INTERVAL_S = 0.02


def resident_bytes(pid: int | None = None) -> int:
    """RssAnon + RssShmem of a process and all below it, now."""
    return sum(_of_process(member) for member in _family(pid or os.getpid()))


def peak_rss_bytes(pid: int | None = None) -> int:
    """VmHWM of a process: the most it ever held, mapped files included; 0 where it is gone."""
    return _fields(pid or os.getpid()).get("VmHWM", 0)


class PeakMemory:
    """Watches memory while its block runs; `peak_bytes` is the most that was seen.

    Samples every 20 ms on a thread of its own, and at both ends of the block.
    """

    def __init__(self, pid: int | None = None) -> None:
        self.peak_bytes = 0
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="moestro-memory", daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._look()

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, resident_bytes(self._pid))


def _of_process(pid: int) -> int:
    fields = _fields(pid)
    return fields.get("RssAnon", 0) + fields.get("RssShmem", 0)


def _fields(pid: int) -> dict[str, int]:
    """The sizes in /proc/PID/status in bytes; none where the process or /proc is missing."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    sizes = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            sizes[name] = int(words[0]) * 1024
    return sizes


def _family(first: int) -> Iterator[int]:
    """A process and its descendants."""
    waiting = [first]
    while waiting:
        pid = waiting.pop()
        yield pid
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except (OSError, ValueError):
            continue
