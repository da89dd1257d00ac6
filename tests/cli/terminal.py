"""Running the command as a user does: another process, its output and its exit code."""

import logging
import os
import signal
import subprocess
import sys
from typing import Any

from moestro.cli.main import main as real_main


def environment(**extra: str) -> dict[str, str]:
    """The process's own, so that the same moestro is found, with one compute thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **extra}


def moestro(
    *arguments: str, env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """`moestro ARGUMENTS`, to its end."""
    options.setdefault("stdin", subprocess.DEVNULL)
    if "input" in options:
        del options["stdin"]
    return subprocess.run(
        [sys.executable, "-m", "moestro", *arguments],
        capture_output=options.pop("capture_output", True),
        text=True,
        encoding="utf-8",
        errors="surrogateescape",
        env=environment(**(env or {})),
        timeout=240,
        **options,
    )


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """`moestro ARGUMENTS`, left running, with stdout and stderr as pipes.

    It heeds SIGINT even where this process was started in the background and ignores it.
    """
    options.setdefault("stdin", subprocess.DEVNULL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        options.setdefault("preexec_fn", lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    return subprocess.Popen(
        [sys.executable, "-m", "moestro", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        **options,
    )


def main(arguments: list[str]) -> int:
    """The command inside this process; the logging it sets up is taken down again."""
    logger = logging.getLogger("moestro")
    before = logger.handlers[:], logger.level, logger.propagate
    try:
        return real_main(arguments)
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
