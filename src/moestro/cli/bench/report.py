"""How benchmarks show their results: tables for people, charts, and the circumstances."""

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moestro.cli.console import print_json
from moestro.errors import ConfigError


def circumstances(command: str) -> dict[str, Any]:
    """What stands beside every number: machine, versions, commit, command, date."""
    from moestro.cli.machine import machine_facts, version_facts

    return {
        "machine": machine_facts(),
        "versions": version_facts(),
        "commit": commit(),
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def check_output(path: Path | None, flag: str = "--output") -> None:
    """Before anything is measured: whether the flag's file can be written. Raises ConfigError."""
    if path is None:
        return
    try:
        there = path.exists()
        if path.is_fifo():
            return  # opening waits for its reader, and closing would tell it that all was said
        path.open("a").close()  # permissions don't tell: /proc takes no file
        if not there:
            os.unlink(os.path.realpath(path))  # what a dangling link leads to, not the link
    except OSError as error:
        raise ConfigError(
            f"{flag} {path} can't be written ({error.strerror}): name a file that can."
        ) from error


def conclude(args: argparse.Namespace, result: dict[str, Any], show: Callable[..., None]) -> None:
    """Print the result, as JSON with --json, by `show` without; then write it to --output."""
    if args.json:
        print_json(result)
    else:
        show(result)
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar over `total` steps on stderr, advanced by calling; none where that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.update(task, advance=1)


def commit() -> str | None:
    """The commit of the source tree that this runs from; None for an installed package."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def table(title: str, columns: tuple[str, ...]) -> Table:
    """A table whose first column is text and whose others are numbers."""
    made = Table(title=title or None, title_justify="left")
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i else "left", no_wrap=True)
    return made


def print_table(made: Table) -> None:
    """To stdout; as wide as it has to be where stdout is no terminal."""
    console = Console()
    Console(width=None if console.is_terminal else 160).print(made)


def share(value: float | None) -> str:
    """A fraction of a bound in percent."""
    return "" if value is None else f"{100 * value:.0f}%"


def print_peers(result: dict[str, Any]) -> None:
    """The tables of `moestro bench peers`."""
    limits = result["limits"]
    title = (
        f"{result['threads']} threads; limits: bf16 {limits['bf16_flops_per_s'] / 1e12:.2f} "
        f"TFLOP/s, int8 {limits['int8_ops_per_s'] / 1e12:.2f} TOP/s, read "
        f"{limits['read_bytes_per_s'] / 1e9:.0f} GB/s"
    )
    columns = (
        "measure",
        "engine",
        "tokens/s",
        "of bound",
        "ours / its (95%)",
        "pairs",
        "read GB/s",
    )
    made = table(title, columns)
    for row in result["rows"]:
        for name, engine in row["engines"].items():
            ratio = ""
            if "ratio" in engine:
                low, high = engine["ratio_95"]
                ratio = f"{engine['ratio']:.2f} ({low:.2f}-{high:.2f})"
            counted = f"{row['pairs']} (-{row['dropped']})" + ("!" if row["unsteady"] else "")
            made.add_row(
                f"{row['format']} {row['measure']}",
                name,
                f"{engine['tokens_per_s']:.1f}",
                share(engine.get("share_of_bound")),
                ratio,
                counted,
                f"{row['bandwidth_bytes_per_s'] / 1e9:.0f}",
            )
    print_table(made)
    memory = table(
        "peak memory while loading and answering batch 1, GB", ("engine", "own", "VmHWM")
    )
    for name, engine in result["engines"].items():
        own, rss = engine["peak_memory_bytes"] / 1e9, engine["peak_rss_bytes"] / 1e9
        memory.add_row(name, f"{own:.2f}", f"{rss:.2f}")
    print_table(memory)


def check_chart(path: Path | None) -> None:
    """Before anything is measured: whether a chart can be drawn. Raises ConfigError."""
    if path is None:
        return
    if path.suffix != ".svg":
        raise ConfigError(f"--chart writes SVG: name a file that ends in .svg, not {path}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--chart needs matplotlib: pip install 'moestro[bench]', or leave it out."
        ) from error
    check_output(path, "--chart")


def draw_ratios(rows: list[dict[str, Any]], path: Path) -> None:
    """One bar a row and peer: our rate over its, with the 95% interval; SVG."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    bars = [
        (f"{row['format']} {row['measure']} / {name}", e["ratio"], e["ratio_95"], name)
        for row in rows
        for name, e in row["engines"].items()
        if "ratio" in e
    ]
    figure = Figure(figsize=(7, 1 + 0.24 * len(bars)), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    peers = list(dict.fromkeys(bar[3] for bar in bars))
    for at, (_, ratio, (low, high), name) in enumerate(bars):
        error = [[max(0.0, ratio - low)], [max(0.0, high - ratio)]]
        axes.barh(at, ratio, xerr=error, color=f"C{peers.index(name)}", height=0.7)
    axes.set_yticks(range(len(bars)), [bar[0] for bar in bars], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("Moestro's tokens/s over the peer's (median of pairs, 95% interval)")
    figure.savefig(path, format="svg")


def print_kernels(result: dict[str, Any]) -> None:
    """The tables of `moestro bench kernels`: one a group, a line a row and peer."""
    from itertools import groupby

    head = f"{result['isa']}, {result['threads']} threads"
    columns = ("", "ms", "of bound", "GB/s", "TOP/s", "beside", "ms ", "ratio (95%)")
    for group, rows in groupby(result["rows"], key=lambda row: str(row["group"])):
        made = table(f"{group}: {head}", columns)
        for row in rows:
            for cells in _kernel_lines(row):
                made.add_row(*cells)
        print_table(made)


def _kernel_lines(row: dict[str, Any]) -> list[tuple[str, ...]]:
    engines = dict(row["engines"])
    ours = engines.pop("moestro")
    s = ours["seconds"]
    mark = "!" if row["unsteady"] else ""
    first = (
        row["name"] + mark,
        f"{s * 1e3:.3f}",
        share(ours.get("share_of_bound")),
        f"{row['read_bytes'] / s / 1e9:.0f}",
        f"{row['operations'] / s / 1e12:.2f}",
    )
    lines: list[tuple[str, ...]] = []
    for name, theirs in engines.items():
        low, high = theirs["ratio_95"]
        ratio = f"{theirs['ratio']:.2f} ({low:.2f}-{high:.2f})"
        shown = ("",) * len(first) if lines else first
        lines.append((*shown, name, f"{theirs['seconds'] * 1e3:.3f}", ratio))
    return lines or [(*first, "", "", "")]


def print_ladders(result: dict[str, Any]) -> None:
    """The tables of `moestro bench ladder`."""
    columns = ("stage", "ms a token", "step gain (95%)", "gain so far", "tokens")
    for ladder in result["ladders"]:
        title = f"{result['model']}, {ladder['format']}, batch {ladder['batch_size']}"
        made = table(title, columns)
        for at, rung in enumerate(ladder["rungs"]):
            low, high = rung["step_gain_95"]
            equal = "equal" if rung["equal_tokens"] else f"differ after {min(rung['same_tokens'])}"
            made.add_row(
                rung["name"],
                f"{rung['ms_per_token']:.2f}",
                f"{rung['step_gain']:.2f} ({low:.2f}-{high:.2f})" if at else "",
                f"{rung['gain']:.2f}",
                equal if at else "",
            )
        print_table(made)
        loads = table("", ("start-up", "seconds until a step"))
        for name, seconds in ladder["load_s"].items():
            loads.add_row(name, f"{seconds:.1f}")
        print_table(loads)
