"""`moestro bench kernels`: each op beside torch's own, and beside the machine's limits."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moestro.cli.bench import report
from moestro.cli.bench.flags import check_num_threads, names
from moestro.cli.console import add_common_flags, note, start_logging
from moestro.errors import ConfigError

if TYPE_CHECKING:
    from moestro.cli.bench.works.work import Work

HELP = "speed of each op beside torch's and beside the machine's limits"
DESCRIPTION = (
    "Calls ops and torch's counterparts in turn on shapes of Hy3, Qwen3-30B-A3B and the benchmark "
    "model; prints medians, the median paired ratio with its 95% interval and the fraction of the "
    "bound: the time that reading or computing takes at limits measured in the same run."
)

GROUPS = ("linear", "router", "moe", "attention", "chain", "layer")
SHAPE_NAMES = ("hy3", "qwen3", "bench")
FORMATS = ("bf16", "w8a8", "w4a8", "fp8", "fp32")
KV_KINDS = ("bfloat16", "int8", "fp8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moestro bench kernels`."""
    group = parser.add_argument_group("Benchmark")
    add = group.add_argument
    for flag, known, default in (
        ("--only", GROUPS, ",".join(GROUPS)),
        ("--shapes", SHAPE_NAMES, ",".join(SHAPE_NAMES)),
        ("--formats", FORMATS, "bf16,w8a8,w4a8"),
        ("--kv", KV_KINDS, "bfloat16"),
    ):
        text = f"of {', '.join(known)} (default: {default})"
        add(flag, default=default, metavar="NAME,...", help=text)
    add("--num-threads", type=int, default=2, metavar="N", help="threads (default: 2)")
    add("--seconds", type=float, default=0.5, metavar="S", help="time of a row (default: 0.5)")
    add("--isa", metavar="LEVEL", help="kernel level (default: MOESTRO_CPU_ISA, else the best)")
    add("--output", type=Path, metavar="FILE", help="write the JSON here, too")
    add_common_flags(parser, json_help="print the result as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    start_logging(args)
    report.check_output(args.output)
    check_num_threads(args.num_threads)
    if not 0 < args.seconds <= 600:
        raise ConfigError(f"--seconds must be above 0 and at most 600, got {args.seconds}.")
    groups = names("--only", args.only, GROUPS)
    shapes = names("--shapes", args.shapes, SHAPE_NAMES)
    formats = names("--formats", args.formats, FORMATS)
    kv = names("--kv", args.kv, KV_KINDS)
    result = {
        "benchmark": "kernels",
        **measure(args, works(groups, list(shapes), list(formats), list(kv))),
        **report.circumstances(args.command_line),
    }
    report.conclude(args, result, report.print_kernels)
    return 0


def measure(args: argparse.Namespace, made: Iterator["Work"]) -> dict[str, Any]:
    """A row of each work, at the level and with the threads that the flags name."""
    import torch

    from moestro.backends import load_backend
    from moestro.backends.cpu import library
    from moestro.cli.bench.limits import measure_limits
    from moestro.cli.bench.works.work import Bandwidth, measure_work

    native = library.native()
    if args.isa not in (None, *native.levels()):
        raise ConfigError(
            f"--isa {args.isa}: this machine does not run that level; it has: "
            f"{', '.join(native.levels())}. Choose one of these."
        )
    load_backend("cpu").set_num_threads(args.num_threads)
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(0)
    with native.at_level(args.isa or library.status().isa):
        level = native.level().decode()
        limits, bandwidth = measure_limits(args.num_threads), Bandwidth()
        rows = []
        for work in made:
            note(f"{work.group}: {work.name}")
            rows.append(measure_work(work, limits, bandwidth, args.seconds))
    return {"threads": args.num_threads, "isa": level, "limits": asdict(limits), "rows": rows}


def works(
    groups: tuple[str, ...], shapes: list[str], formats: list[str], kv: list[str]
) -> Iterator["Work"]:
    """What the groups measure, made when it is its turn."""
    from moestro.cli.bench.works import attention, layer, matmul

    made = {
        "linear": lambda: matmul.linears(shapes, formats),
        "router": matmul.routers,
        "moe": lambda: matmul.experts(shapes, [f for f in formats if f != "fp32"]),
        "attention": lambda: attention.attention(shapes, kv),
        "chain": lambda: attention.chain(shapes, kv),
        "layer": lambda: layer.layers([f for f in formats if f != "fp32"]),
    }
    for group in groups:
        yield from made[group]()
