"""`moestro bench kv`: what a real trace finds in KV tiers of given sizes, without a model."""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moestro.cli.bench import kv_report, report
from moestro.cli.console import add_common_flags, start_logging
from moestro.errors import ConfigError, shown

if TYPE_CHECKING:
    from moestro.simulator.replay import Capacity, Clients, ReplayResult
    from moestro.simulator.sim_mover import MoveCosts
    from moestro.simulator.sim_runner import StepCosts
    from moestro.simulator.workload import Workload

HELP = "hit rate of KV tiers by their size, on real traces"
DESCRIPTION = (
    "Replays a trace through the engine's own scheduler and KV accounting, with pages that hold "
    "nothing and a clock that a step advances by what it would take: so many clients (lanes), each "
    "going through one session after the other. Every combination of lanes and sizes is a run. "
    "Beside each: a plain LRU of the same size, and a cache that forgets nothing."
)

PAGE_SIZE = 64
TRACES = {
    "weka": "weka/claude_code_traces.rle.jsonl.gz",
    "mooncake": "mooncake/conversation_trace.jsonl.gz",
}
_TOKENS_A_LANE = (32_000, 64_000, 128_000, 256_000)
_MAX_TOKENS = 1 << 36
_MAX_LANES = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moestro bench kv`."""
    group = parser.add_argument_group("Trace")
    group.add_argument(
        "--trace",
        default="weka",
        metavar="weka|mooncake|FILE",
        help="sessions of a coding agent, chat requests, or a file in one of their two formats "
        "(default: weka)",
    )
    group.add_argument("--max-requests", metavar="N", help="only the first N (default: all)")
    group.add_argument(
        "--every", default="1", metavar="N", help="only every Nth session (default: 1, all)"
    )
    group.add_argument(
        "--max-context", metavar="N", help="leave out sessions with a longer request (default: no)"
    )
    group = parser.add_argument_group("Clients")
    group.add_argument("--lanes", default="16", metavar="N,...", help="at a time (default: 16)")
    group.add_argument(
        "--gap-cap",
        type=float,
        default=60.0,
        metavar="S",
        help="a client thinks at most so long (default: 60)",
    )
    group.add_argument(
        "--hints",
        action="store_true",
        help="pin a session's KV after each answer, drop it after the last",
    )
    group.add_argument(
        "--pin-ttl",
        type=float,
        default=600.0,
        metavar="S",
        help="with --hints: how long a pin lasts (default: 600)",
    )
    _add_tiers(parser)
    add_common_flags(parser, json_help="print the result as one JSON object")
    _add_files(parser)
    parser.set_defaults(run=run)


def _add_tiers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Tiers and speeds")
    group.add_argument(
        "--device-tokens",
        metavar="N,...",
        help="sizes of the device's KV in tokens, such as 500k,2m "
        "(default: 32k, 64k, 128k and 256k a lane)",
    )
    for tier in ("host", "store"):
        group.add_argument(
            f"--{tier}-tokens", default="0", metavar="N,...", help="(default: 0, no such tier)"
        )
    group.add_argument(
        "--prefill-tokens-per-s",
        type=float,
        default=20_000.0,
        metavar="N",
        help="(default: 20000)",
    )
    group.add_argument(
        "--decode-step-ms",
        type=float,
        default=30.0,
        metavar="MS",
        help="of a step of any batch (default: 30)",
    )
    group.add_argument(
        "--kv-bytes-per-token",
        type=int,
        default=168_960,
        metavar="N",
        help="(default: 168960, Hy3 with an int8 KV cache)",
    )
    for tier, gbps in (("host", 50.0), ("store", 4.0)):
        group.add_argument(
            f"--{tier}-gbps",
            type=float,
            default=gbps,
            metavar="N",
            help=f"GB/s that are read from it (default: {gbps:g})",
        )


def _add_files(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Files")
    group.add_argument("--output", type=Path, metavar="FILE", help="write the result as JSON too")
    group.add_argument(
        "--chart", type=Path, metavar="FILE", help="draw the hit rates as SVG; needs matplotlib"
    )


def run(args: argparse.Namespace) -> int:
    """Replay each combination, print as they are done."""
    from moestro.simulator.workload import load_workload

    start_logging(args)
    report.check_output(args.output)
    report.check_chart(args.chart)
    points = list(_points(args))
    costs, moves = _costs(args)
    every = _count("--every", args.every) or 1
    limits = (
        _count("--max-requests", args.max_requests),
        _count("--max-context", args.max_context),
    )
    workload = load_workload(trace_path(args.trace)).thinned(every).limited(*limits)
    if not workload.sessions:
        raise ConfigError(f"--max-context {args.max_context} leaves no session of the trace.")
    if args.hints and not workload.has_sessions:
        raise ConfigError(
            f"--hints are about sessions, and the trace {args.trace} does not tell which requests "
            "belong to one: leave them out."
        )
    told = []
    with report.progress("requests", workload.num_requests * len(points)) as advance:
        for clients, capacity in points:
            told.append(measure(workload, clients, capacity, costs, moves, advance))
    result = {
        "benchmark": "kv",
        "trace": workload.name,
        "num_sessions": len(workload.sessions),
        "num_requests": workload.num_requests,
        "page_size": PAGE_SIZE,
        "step_costs": asdict(costs),
        "move_costs": asdict(moves),
        "points": told,
        **report.circumstances(args.command_line),
    }
    report.conclude(args, result, kv_report.print_hits)
    if args.chart:
        kv_report.draw_hits(result, args.chart)
    return 0


def measure(
    workload: "Workload",
    clients: "Clients",
    capacity: "Capacity",
    costs: "StepCosts",
    moves: "MoveCosts",
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """One point: rates by tier, the yardsticks' rates, and what the replay itself cost."""
    from moestro.simulator.replay import Replay

    started, cpu_started = time.perf_counter(), time.process_time()
    replay = Replay(workload, capacity, clients, costs, moves, PAGE_SIZE, advance)
    result = replay.run()
    cpu_s, wall_s = time.process_time() - cpu_started, time.perf_counter() - started
    if not result.num_requests:
        raise ConfigError(
            f"No request of the trace fits in {capacity.device_pages * PAGE_SIZE:,} tokens: "
            "raise --device-tokens."
        )
    return {
        "lanes": clients.num_lanes,
        "gap_cap_s": clients.gap_cap_s,
        "pin_ttl_s": clients.pin_ttl_s,
        "device_tokens": capacity.device_pages * PAGE_SIZE,
        "host_tokens": capacity.host_pages * PAGE_SIZE,
        "store_tokens": capacity.store_pages * PAGE_SIZE,
        **_rates(workload, capacity, result),
        "num_requests": result.num_requests,
        "num_refused": result.num_refused,
        "num_preemptions": result.num_preemptions,
        "num_prefill_tokens": result.num_prefill_tokens,
        "virtual_s": result.virtual_s,
        "mean_ttft_s": sum(result.ttft_s) / len(result.ttft_s),
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "cpu_us_per_request": cpu_s / result.num_requests * 1e6,
        "cpu_ns_per_page": cpu_s / result.num_pages * 1e9,
    }


def _rates(workload: "Workload", capacity: "Capacity", result: "ReplayResult") -> dict[str, Any]:
    """Shares of the prompts' tokens: found in each tier, by an LRU as large as the device and as
    large as the largest tier (each holds what those above it do), by one as large as the device
    that can't evict what running requests hold, and by the ideal cache."""
    from moestro.simulator.offline_lru import HeldLRU, OfflineLRU

    tiers = (capacity.device_pages, capacity.host_pages, capacity.store_pages)
    offline = OfflineLRU((tiers[0], max(tiers)), PAGE_SIZE, workload.block_size)
    held = HeldLRU(tiers[0], PAGE_SIZE, workload.block_size)
    for scope, request, ends in result.served:
        if ends:
            held.end(scope, request)
        else:
            held.begin(scope, request)
            offline.begin(scope, request)
            offline.end(scope, request)
    total = result.queries_tokens
    found = (result.device_tokens, result.host_tokens, result.store_tokens)
    names = ("device_hit_rate", "host_hit_rate", "store_hit_rate")
    return {
        "hit_rate": sum(found) / total,
        **dict(zip(names, (tokens / total for tokens in found), strict=True)),
        "lru_device_hit_rate": offline.hits_tokens[0] / total,
        "lru_hit_rate": offline.hits_tokens[1] / total,
        "held_lru_device_hit_rate": held.hits_tokens / total,
        "ideal_hit_rate": offline.ideal_hits_tokens / total,
        "queries_tokens": total,
    }


def trace_path(name: str) -> Path:
    """The file of a trace of bench/traces, in the tree of this file or the one that is the current
    folder, or the file named. Raises ConfigError.
    """
    if name not in TRACES:
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"--trace must be {', '.join(TRACES)} or a file, got {shown(name)}.")
        return path
    for tree in (Path(__file__).parents[4], Path()):
        path = tree / "bench" / "traces" / TRACES[name]
        if path.is_file():
            return path
    raise ConfigError(
        f"The trace {name} comes with the source tree (bench/traces), not with an installed "
        "package: run this at the root of the tree, or give its file."
    )


def _points(args: argparse.Namespace) -> Iterator[tuple["Clients", "Capacity"]]:
    from moestro.simulator.replay import Capacity, Clients

    if not 0 <= args.pin_ttl <= 86_400:
        raise ConfigError(f"--pin-ttl must be between 0 and 86400 seconds, got {args.pin_ttl}.")
    for num_lanes in _counts("--lanes", args.lanes, 1, _MAX_LANES):
        clients = Clients(
            num_lanes=num_lanes,
            gap_cap_s=args.gap_cap,
            pin_ttl_s=args.pin_ttl if args.hints else None,
        )
        device = [num_lanes * tokens for tokens in _TOKENS_A_LANE]
        if args.device_tokens is not None:
            device = _counts("--device-tokens", args.device_tokens, PAGE_SIZE, _MAX_TOKENS)
        host = _counts("--host-tokens", args.host_tokens, 0, _MAX_TOKENS)
        store = _counts("--store-tokens", args.store_tokens, 0, _MAX_TOKENS)
        for sizes in product(store, host, device):
            pages = [size // PAGE_SIZE for size in sizes]
            yield (
                clients,
                Capacity(store_pages=pages[0], host_pages=pages[1], device_pages=pages[2]),
            )


def _costs(args: argparse.Namespace) -> tuple["StepCosts", "MoveCosts"]:
    from moestro.simulator.sim_mover import MoveCosts
    from moestro.simulator.sim_runner import StepCosts

    costs = StepCosts(
        prefill_tokens_per_s=args.prefill_tokens_per_s,
        decode_step_s=args.decode_step_ms / 1e3,
        page_bytes=PAGE_SIZE * args.kv_bytes_per_token,
        load_bytes_per_s=args.host_gbps * 1e9,
    )
    return costs, MoveCosts(
        save_bytes_per_s=args.host_gbps * 1e9,
        put_bytes_per_s=args.store_gbps * 1e9,
        fetch_bytes_per_s=args.store_gbps * 1e9,
    )


def _counts(flag: str, text: str, low: int, high: int) -> list[int]:
    """Whole numbers separated by commas; 500k and 2m are taken. Raises ConfigError."""
    from moestro.config.kinds import Integer

    kind = Integer(low, high)
    try:
        return [int(kind.parse(part) or 0) for part in text.split(",")]
    except (TypeError, ValueError):
        raise ConfigError(f"{flag} takes {kind.expects}, or several, got {shown(text)}.") from None


def _count(flag: str, text: str | None) -> int | None:
    return None if text is None else _counts(flag, text, 1, _MAX_TOKENS)[0]
