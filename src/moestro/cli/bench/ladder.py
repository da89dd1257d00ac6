"""`moestro bench ladder`: what each stage of the engine brings, one switched on after another."""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestro.cli.bench import report
from moestro.cli.bench.flags import check_num_threads, engine_fields, names
from moestro.cli.bench.pairing import Round, rotated
from moestro.cli.bench.peers import ENGINES, OWN_FIELDS
from moestro.cli.bench.statistics import median, median_interval
from moestro.cli.console import add_common_flags, note, start_logging
from moestro.errors import ConfigError

HELP = "what each stage brings: fused ops, grouped matmul, graph replay, packed cache"
DESCRIPTION = (
    "Builds engines with the stages switched on one at a time, decodes with each in turn, checks "
    "that all give the same tokens, and prints ms a token with the gain of each step and the gain "
    "so far. The packed cache changes only how long loading takes."
)


@dataclass(frozen=True, slots=True)
class Rung:
    """A stage: the engine it runs on, and the sets of ops that works.unfused serves instead."""

    name: str
    engine: str
    unfused: tuple[str, ...] = ()


EAGER = {"enforce_eager": True, "weight_cache": "off"}
REPLAY = {"weight_cache": "off"}
ENGINES_OF_RUNGS: dict[str, dict[str, Any]] = {
    "eager": EAGER,
    "replay": REPLAY,
    "first start": {},
    "later start": {},
}
"""Both starts keep packed weights in one new folder: the first fills it, the later maps it."""
_OWN_FIELDS = OWN_FIELDS.union(*ENGINES_OF_RUNGS.values())
"""EngineConfig fields that --engine can't set."""
RUNGS = (
    Rung("eager, unfused, a loop over experts", "eager", ("ELEMENTWISE", "LOOP")),
    Rung("fused ops", "eager", ("LOOP",)),
    Rung("grouped matmul", "eager"),
    Rung("graph replay", "replay"),
    Rung("packed cache", "later start"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moestro bench ladder`."""
    group = parser.add_argument_group("Benchmark")
    add = group.add_argument
    add("--model", default="tiny-hy3", metavar="DIR", help="model (default: tiny-hy3)")
    formats = ", ".join(ENGINES)
    add("--formats", default="bf16", metavar="NAME,...", help=f"of {formats} (default: bf16)")
    add("--pairs", type=int, default=12, metavar="N", help="rounds (default: 12)")
    add("--steps", type=int, default=16, metavar="N", help="decode steps of a round (default: 16)")
    add("--batch-size", type=int, default=1, metavar="N", help="sequences (default: 1)")
    add("--input-len", type=int, default=64, metavar="N", help="prompt tokens (default: 64)")
    add("--num-threads", type=int, default=2, metavar="N", help="threads (default: 2)")
    engine_help = "more EngineConfig fields, as one JSON object"
    add("--engine", default="{}", metavar="JSON", help=engine_help)
    add("--output", type=Path, metavar="FILE", help="write the JSON here, too")
    add_common_flags(parser, json_help="print the result as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Exit status 1 when the rungs disagree about a token."""
    from moestro.backends.cpu import library

    start_logging(args)
    report.check_output(args.output)
    for flag in ("pairs", "steps", "batch_size", "input_len"):
        if getattr(args, flag) < 1:
            shown = flag.replace("_", "-")
            raise ConfigError(f"--{shown} must be at least 1, got {getattr(args, flag)}.")
    check_num_threads(args.num_threads)
    formats = names("--formats", args.formats, ENGINES)
    extra = engine_fields(args.engine, _OWN_FIELDS)
    library.native()  # raises where the reference serves: it has neither stages nor bandwidth
    result = {
        "benchmark": "ladder",
        "model": args.model,
        "ladders": [measure(args, weights, extra) for weights in formats],
        **report.circumstances(args.command_line),
    }
    report.conclude(args, result, report.print_ladders)
    equal = all(r["equal_tokens"] for ladder in result["ladders"] for r in ladder["rungs"])
    return 0 if equal else 1


def measure(args: argparse.Namespace, weights: str, extra: dict[str, Any]) -> dict[str, Any]:
    """The rungs of one format, in alternating rounds."""
    from moestro.cli.bench.resident import Resident, build

    command = {
        "do": "decode",
        "batch": args.batch_size,
        "context": args.input_len,
        "steps": args.steps,
        "token_ids": True,
    }
    load_s: dict[str, float] = {}
    tokens: dict[str, list[list[int]]] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="moestro-ladder-"))
        engines = {}
        for name, own in ENGINES_OF_RUNGS.items():
            wanted = {**ENGINES[weights], "weight_cache": folder, **own, **extra}
            note(f"{weights}: loading, {name}")
            began = time.perf_counter()
            built = build(args.model, args.num_threads, wanted)
            load_s[name] = time.perf_counter() - began
            if any(rung.engine == name for rung in RUNGS):
                stack.callback(built.engine.close)
                engines[name] = Resident(built)
            else:
                built.engine.close()

        def ask(rung: Rung) -> float:
            with _bodies(rung):
                answer = engines[rung.engine].answer(command)
            tokens.setdefault(rung.name, answer["token_ids"])
            return float(answer["seconds"])

        for rung in RUNGS:
            ask(rung)
        rounds = _rounds(ask, args.pairs, weights)
    return {
        "format": weights,
        "batch_size": args.batch_size,
        "load_s": load_s,
        "rungs": steps_of(rounds, tokens, args.steps * args.batch_size),
    }


def steps_of(
    rounds: list[Round], tokens: Mapping[str, list[list[int]]], num_tokens: int
) -> list[dict[str, Any]]:
    """Each rung: ms a token, gain over the rung before and over the first, tokens equal or not."""
    kept = [r for r in rounds if r.is_steady] or rounds
    first = RUNGS[0].name
    told = []
    before = first
    for rung in RUNGS:
        gains = [r.seconds[before] / r.seconds[rung.name] for r in kept]
        told.append(
            {
                "name": rung.name,
                "ms_per_token": median([1e3 * r.seconds[rung.name] / num_tokens for r in kept]),
                "step_gain": median(gains),
                "step_gain_95": list(median_interval(gains)),
                "gain": median([r.seconds[first] / r.seconds[rung.name] for r in kept]),
                "equal_tokens": tokens[rung.name] == tokens[first],
                "same_tokens": same_prefix(tokens[rung.name], tokens[first]),
            }
        )
        before = rung.name
    return told


def same_prefix(ours: list[list[int]], first: list[list[int]]) -> list[int]:
    """Of each sequence: how many tokens agree from its first on."""
    counts = []
    for a, b in zip(ours, first, strict=True):
        differing = (i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        counts.append(next(differing, len(a)))
    return counts


def _rounds(ask: Callable[[Rung], float], pairs: int, weights: str) -> list[Round]:
    from moestro.cli.bench.limits import read_bandwidth

    note(f"{weights}: {pairs} rounds")
    rungs = {rung.name: rung for rung in RUNGS}
    rounds, before = [], read_bandwidth()
    for turn in range(pairs):
        seconds = {name: ask(rungs[name]) for name in rotated(list(rungs), turn)}
        after = read_bandwidth()
        rounds.append(Round(seconds, before, after))
        before = after
    return rounds


@contextmanager
def _bodies(rung: Rung) -> Iterator[None]:
    from moestro.cli.bench.works import unfused

    with unfused.served_by({k: v for n in rung.unfused for k, v in getattr(unfused, n).items()}):
        yield
