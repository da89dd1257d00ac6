"""`moestro bench machine`: what the machine can do at best, as the bound of every kernel."""

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moestro.cli.bench import report
from moestro.cli.bench.flags import check_num_threads
from moestro.cli.bench.statistics import median
from moestro.cli.console import add_common_flags, print_json, start_logging, write_text
from moestro.errors import ConfigError

if TYPE_CHECKING:
    from moestro.backends.cpu.machine import Kind

HELP = "memory bandwidth and arithmetic peaks, the bounds of every kernel"
DESCRIPTION = (
    "Reads a buffer that no cache holds, and runs the best multiply-add of the kernel level in use "
    "on registers alone: with one thread, then with all. Medians of short runs."
)

_RUNS = 9
_READ_SHARE = 0.5
"""Of the time, for reading; the rest is shared by the kinds of product."""
_CALL_S = 2.0
"""One native call lasts about so long at most: Python hears of Ctrl-C only after it."""


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """What `num_threads` threads reach together at kernel level `level`; medians.

    A multiply-add is two operations. None: the level has no instruction for it.
    """

    level: str
    num_threads: int
    read_gbps: float
    read_gbps_range: tuple[float, float]
    """slowest and fastest run: memory may be shared, and then it is not steady"""
    read_buffer_bytes: int
    fp32_gflops: float
    bf16_gflops: float | None
    int8_gops: float | None


def measure_machine(num_threads: int = 0, seconds: float = 2.0) -> MachineLimits:
    """Measure, with the level in use; takes about `seconds` and some 0.2 s to fill the buffer.

    num_threads: 0 is what affinity and cgroup allow. No other thread may compute meanwhile; the
    library's number of threads is restored. Raises UnsupportedError without a kernel library.
    """
    from moestro.backends.cpu import library, machine
    from moestro.core.hardware import probe_cpu

    hardware = probe_cpu()
    threads = num_threads or hardware.num_threads
    size = machine.read_buffer_bytes(hardware.available_bytes)
    run_s = (1 - _READ_SHARE) * seconds / len(machine.KINDS) / (_RUNS + 2)
    with _threads(threads):
        reads = machine.read_rates(size, 3)
        runs = _runs_in(_READ_SHARE * seconds, size / median(reads))
        each = max(3, int(_CALL_S * median(reads) / size))
        reads = [r for at in range(0, runs, each) for r in machine.read_rates(size, each)]
        peaks = {kind: _peak_rates(kind, run_s) for kind in machine.KINDS}
    billions = {k: None if v is None else median(v) / 1e9 for k, v in peaks.items()}
    return MachineLimits(
        level=library.native().level().decode(),
        num_threads=threads,
        read_gbps=median(reads) / 1e9,
        read_gbps_range=(min(reads) / 1e9, max(reads) / 1e9),
        read_buffer_bytes=size,
        fp32_gflops=billions["fp32"] or 0.0,
        bf16_gflops=billions["bf16"],
        int8_gops=billions["int8"],
    )


def _peak_rates(kind: "Kind", run_s: float) -> list[float] | None:
    """_RUNS runs of run_s seconds, or more and shorter ones."""
    from moestro.backends.cpu import machine

    calls = math.ceil((_RUNS + 2) * run_s / _CALL_S)
    rates: list[float] = []
    for _ in range(calls):
        more = machine.peak_rates(kind, run_s / calls, _RUNS)
        if more is None:
            return None
        rates += more
    return rates


def _runs_in(seconds: float, run_s: float) -> int:
    return max(3, min(1000, int(seconds / run_s)))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    from moestro.backends.cpu.device import CpuDevice
    from moestro.backends.cpu.library import native

    before = native().num_threads()
    if count != before:
        CpuDevice().set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            native().set_num_threads(before)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moestro bench machine`."""
    group = parser.add_argument_group("Benchmark")
    group.add_argument(
        "--num-threads",
        type=int,
        default=0,
        metavar="N",
        help="threads (default: 0, as many as affinity and cgroup allow)",
    )
    group.add_argument(
        "--seconds",
        type=float,
        default=3.0,
        metavar="S",
        help="time for each number of threads (default: 3)",
    )
    add_common_flags(parser, json_help="print the result as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure with one thread and with all, and print."""
    start_logging(args)
    check_num_threads(args.num_threads, least=0)
    if not 0 < args.seconds <= 600:
        raise ConfigError(f"--seconds must be above 0 and at most 600, got {args.seconds}.")
    measured = [measure_machine(1, args.seconds)]
    most = measure_machine(args.num_threads, args.seconds)
    if most.num_threads > 1:
        measured.append(most)
    if args.json:
        shared = report.circumstances(args.command_line)
        print_json({"benchmark": "machine", **shared, "limits": measured})
    else:
        write_text("\n".join(_lines(measured)) + "\n")
    return 0


def _lines(measured: list[MachineLimits]) -> list[str]:
    """A column for each number of threads."""
    from moestro.cli.machine import machine_facts

    first = measured[0]
    counts = [f"{m.num_threads} thread{'s' * (m.num_threads > 1)}" for m in measured]
    rows = [
        (f"level {first.level}", counts),
        ("memory read, GB/s", [f"{m.read_gbps:.1f}" for m in measured]),
        (
            "  slowest - fastest run",
            ["{:.1f} - {:.1f}".format(*m.read_gbps_range) for m in measured],
        ),
        ("fp32 multiply-add, GFLOP/s", [_figure(m.fp32_gflops) for m in measured]),
        ("bf16 dot product, GFLOP/s", [_figure(m.bf16_gflops) for m in measured]),
        ("int8 dot product, GOP/s", [_figure(m.int8_gops) for m in measured]),
    ]
    table = [f"{name:<28}" + "".join(f"{cell:>16}" for cell in cells) for name, cells in rows]
    size = f"{first.read_buffer_bytes / 2**20:.0f} MiB read a run"
    return [*table, f"{machine_facts()['cpu']}; {size}; a multiply-add is two operations"]


def _figure(value: float | None) -> str:
    return "no instruction" if value is None else f"{value:,.0f}"
