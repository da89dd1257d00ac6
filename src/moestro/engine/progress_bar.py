"""A progress bar on stderr, shown only to somebody who watches a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class PromptProgress(Protocol):
    """Told as requests finish."""

    def advance(self, num_done: int, num_tokens: int) -> None:
        """Prompts finished and tokens generated, so far."""


class _Silent:
    def advance(self, num_done: int, num_tokens: int) -> None:
        del num_done, num_tokens


class _Bar:
    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("Processed prompts", total=total, speed="")

    def advance(self, num_done: int, num_tokens: int) -> None:
        elapsed = self._progress.tasks[0].elapsed or 0.0
        speed = f"{num_tokens / elapsed:.1f} tokens/s" if elapsed else ""
        self._progress.update(self._task, completed=num_done, speed=speed)


@contextmanager
def prompt_progress(total: int, wanted: bool) -> Iterator[PromptProgress]:
    """A bar over `total` prompts when `wanted` and stderr is a terminal."""
    if not wanted or not sys.stderr.isatty():
        yield _Silent()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=False) as progress:
        yield _Bar(progress, total)
