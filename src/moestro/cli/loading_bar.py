"""A progress bar for loading weights."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def loading_bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr for loaded bytes; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("load", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
