"""Progress bars for starting: loading weights, then capturing decode steps."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], None]


@contextmanager
def loading_bar() -> Iterator[tuple[Progress, Progress]]:
    """Progress bars on stderr for loaded bytes and captured sizes; none where it is no terminal."""
    if not sys.stderr.isatty():
        yield (lambda _done, _total: None), (lambda _done, _total: None)
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.TextColumn("{task.fields[amount]}"),
        rich.TimeElapsedColumn(),
    )
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        load = bar.add_task("loading weights", total=None, amount="")
        capture = bar.add_task("capturing decode steps", total=None, amount="", visible=False)

        def loaded(done: int, total: int) -> None:
            amount = f"{done / 1e9:.2f}/{total / 1e9:.2f} GB"
            bar.update(load, completed=done, total=total, amount=amount)

        def captured(done: int, total: int) -> None:
            amount = f"{done}/{total} batch sizes"
            bar.update(capture, completed=done, total=total, amount=amount, visible=True)

        yield loaded, captured
