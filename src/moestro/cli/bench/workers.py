"""Engines as resident processes: each loads once, then answers JSON commands, one a line.

While one answers, the others are stopped (SIGSTOP): an engine whose threads spin while they wait
for work would otherwise take the core of the one that is measured.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moestro.cli.bench.memory import PeakMemory, peak_rss_bytes
from moestro.errors import ConfigError, MoestroError

RECORD = "peers.json"
VERSIONS = ("version", "compiler", "torch")


class Worker:
    """A started engine, stopped between its answers.

    peak_memory_bytes: RssAnon + RssShmem of it and its children while it loaded and answered
    each of `first` once.
    """

    def __init__(self, name: str, command: Sequence[str], first: Sequence[dict[str, Any]]) -> None:
        self.name = name
        if shutil.which(command[0]) is None:
            raise ConfigError(
                f"The worker of {name} can't be started: {command[0]} is no program. Install it "
                "again with bench/peers/install.py."
            )
        # A session of its own: signals reach all of an engine's processes, and only them.
        self._process = subprocess.Popen(
            _tied(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with PeakMemory(self._process.pid) as memory:
            self.greeting = self._read()
            for each in first:
                self._ask(each)
        self.peak_memory_bytes = memory.peak_bytes
        self._signal(signal.SIGSTOP)

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Wakes it for one answer. Raises MoestroError when it ended instead."""
        self._signal(signal.SIGCONT)
        answer = self._ask(command)
        self._signal(signal.SIGSTOP)
        return answer

    def memory(self) -> dict[str, int]:
        """Peaks in bytes: of its own pages, and with mapped files (VmHWM)."""
        return {
            "peak_memory_bytes": self.peak_memory_bytes,
            "peak_rss_bytes": peak_rss_bytes(self._process.pid),
        }

    def close(self) -> None:
        """Ends it, politely first."""
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError, ValueError):
            self._write({"do": "quit"})
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
        self._let_go()

    def _let_go(self) -> None:
        """Waits for its end and closes both pipes."""
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(OSError):  # the missing answer tells
            self._write(command)
        return self._read()

    def _write(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self._signal(signal.SIGKILL)
            self._let_go()
            said = f"said {line.strip()!r}" if line else "ended without an answer"
            raise MoestroError(f"The worker of {self.name} {said}; its stderr is above.")
        return answer

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def _tied(command: Sequence[str]) -> list[str]:
    """The command, ended by the kernel with the process that starts it, where setpriv is there.

    A benchmark that is killed must leave no stopped engine behind.
    """
    tie = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
    return [*tie, *command]


def read_record(folder: Path) -> dict[str, dict[str, Any]]:
    """What install.py wrote about each peer. Raises ConfigError."""
    path = folder / RECORD
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} can't be read ({error}): fill the folder with "
            f"`python bench/peers/install.py {folder}`, or name another with --peers-dir."
        ) from error
    if not isinstance(told, dict) or any("worker" not in p for p in told.values()):
        raise ConfigError(f"{path} names no workers: run bench/peers/install.py {folder} again.")
    return told


def versions(recorded: dict[str, Any]) -> dict[str, Any]:
    """What a result tells of a peer: what it is, never where it lies on this machine."""
    return {key: recorded[key] for key in VERSIONS if key in recorded}
