"""`moestro bench peers`: Moestro beside other engines on one model, in alternating rounds."""

import argparse
import datetime
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moestro.cli.bench import bound, report
from moestro.cli.bench.flags import check_num_threads, engine_fields, names
from moestro.cli.bench.limits import Limits, measure_limits, read_bandwidth
from moestro.cli.bench.pairing import Round, measure_rounds, summary
from moestro.cli.bench.workers import Worker, read_record, versions
from moestro.cli.console import add_common_flags, note, start_logging
from moestro.core.model_config import load_model_spec
from moestro.core.model_spec import ModelSpec
from moestro.errors import ConfigError, MoestroError

HELP = "speed and memory beside other engines"
DESCRIPTION = (
    "Runs Moestro and other engines on one model as resident processes that answer in turn, with "
    "the machine's read bandwidth measured before and after each round; a round in which it "
    "changed by more than 15% is dropped and counted. bench/peers/install.py installs the "
    "engines, bench/peers/make_gguf.py converts the model for llama.cpp."
)

BUSY = 0.7
"""Load average above which the machine is taken to have other work."""
OURS, ONE_THREAD = "moestro", "one-thread"
GGUF_FILES = {"bf16": "bf16.gguf", "w8a8": "q8_0.gguf", "w4a8": "q4_0.gguf"}
ENGINES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "w8a8": {"quantization": "w8a8"},
    "w4a8": {"quantization": "w4a8", "quantization_group_size": bound.GROUP},
}
"""EngineConfig fields by format."""
OWN_FIELDS = {"model", "num_threads"}.union(*ENGINES.values())
"""EngineConfig fields that --engine can't set."""


@dataclass(frozen=True, slots=True)
class Peer:
    """What an engine can be asked: gguf by format, or the bf16 checkpoint whatever the format.

    measures: of its own format; others: beside our other formats, which it lacks.
    """

    install: str
    gguf: bool
    measures: frozenset[str]
    others: frozenset[str] = frozenset()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measure:
    """One question: the command, how many tokens its answer makes, and its least work."""

    command: dict[str, Any]
    tokens: int
    batch: int
    context: int

    @property
    def is_prefill(self) -> bool:
        return bool(self.command["do"] == "prefill")

    def work(self, spec: ModelSpec, storage: bound.Storage) -> tuple[float, float]:
        """Bytes read and operations of the whole answer."""
        if self.is_prefill:
            n = self.context
            read = bound.step_bytes(spec, storage, n, 0)
            return read, bound.flops(spec, n, pairs=n * (n + 1) // 2, outputs=1)
        steps = self.tokens // self.batch
        middle = self.context + steps // 2
        read = bound.step_bytes(spec, storage, self.batch, middle) * steps
        pairs = self.tokens * middle
        return read, bound.flops(spec, self.tokens, pairs=pairs, outputs=self.tokens)


def _decode(batch: int, context: int, steps: int) -> Measure:
    command = {"do": "decode", "batch": batch, "context": context, "steps": steps}
    return Measure(command, batch * steps, batch, context)


def _prefill(tokens: int) -> Measure:
    return Measure({"do": "prefill", "tokens": tokens}, tokens, 1, tokens)


MEASURES = {
    "decode-1": _decode(1, 64, 32),
    "decode-8": _decode(8, 16, 16),
    "decode-32": _decode(32, 16, 8),
    "prefill-512": _prefill(512),
    "prefill-2048": _prefill(2048),
}
_ALL = frozenset(MEASURES)
_PREFILL = frozenset(m for m in MEASURES if MEASURES[m].is_prefill)
_ONE = _PREFILL | {"decode-1"}
PEERS = {
    "llama.cpp": Peer("llama.cpp", True, _ALL),
    "ik": Peer("ik", True, _PREFILL | {"decode-1"}),
    "vllm": Peer("vllm", False, _ALL, _PREFILL),
    "vllm-eager": Peer("vllm", False, _ALL, frozenset(), ("--eager",)),
    "hf": Peer("hf", False, _ONE),
    "one-thread": Peer("", False, _ALL, _ALL),
}
"""one-thread is Moestro itself: how it scales."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moestro bench peers`."""
    group = parser.add_argument_group("Benchmark")
    add = group.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="checkpoint folder")
    add("--gguf", type=Path, metavar="DIR", help="folder of make_gguf.py (llama.cpp and ik)")
    add("--peers-dir", type=Path, required=True, metavar="DIR", help="folder of install.py")
    for flag, known, default in (
        ("--formats", ENGINES, "bf16,w8a8,w4a8"),
        ("--peers", PEERS, "llama.cpp,vllm,hf"),
        ("--measures", MEASURES, ",".join(MEASURES)),
    ):
        text = f"of {', '.join(known)} (default: {default})"
        add(flag, default=default, metavar="NAME,...", help=text)
    add("--pairs", type=int, default=12, metavar="N", help="steady rounds (default: 12)")
    add("--num-threads", type=int, default=2, metavar="N", help="of every engine (default: 2)")
    engine_help = "more EngineConfig fields of ours, as one JSON object"
    add("--engine", default="{}", metavar="JSON", help=engine_help)
    add("--output", type=Path, metavar="FILE", help="write the JSON here, too")
    add("--chart", type=Path, metavar="FILE", help="draw the ratios (.svg; needs matplotlib)")
    add_common_flags(parser, json_help="print the result as one JSON object")
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for on the command line."""

    model: Path
    gguf: Path | None
    record: dict[str, dict[str, Any]]
    formats: tuple[str, ...]
    peers: tuple[str, ...]
    measures: tuple[str, ...]
    pairs: int
    threads: int
    engine: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Request":
        """From flags. Raises ConfigError."""
        if args.pairs < 1:
            raise ConfigError(f"--pairs must be at least 1, got {args.pairs}.")
        check_num_threads(args.num_threads)
        engine = engine_fields(args.engine, OWN_FIELDS)
        formats = names("--formats", args.formats, ENGINES)
        peers = names("--peers", args.peers, PEERS)
        measures = names("--measures", args.measures, MEASURES)
        record = read_record(args.peers_dir)
        for peer in peers:
            if peer != ONE_THREAD and PEERS[peer].install not in record:
                raise ConfigError(
                    f"{peer} is not installed in {args.peers_dir}: run bench/peers/install.py "
                    f"{args.peers_dir} --peer {PEERS[peer].install}, or leave it out of --peers."
                )
            if PEERS[peer].gguf and args.gguf is None:
                raise ConfigError(f"{peer} reads GGUF files: name their folder with --gguf.")
        return cls(
            *(
                args.model,
                args.gguf,
                record,
                formats,
                peers,
                measures,
                args.pairs,
                args.num_threads,
            ),
            engine=engine,
        )

    def command(self, name: str, weights: str) -> list[str]:
        """How the worker of an engine is started for a format of ours."""
        tail = ["--threads", "1" if name == ONE_THREAD else str(self.threads)]
        if name in (OURS, ONE_THREAD):
            engine = json.dumps({**ENGINES[weights], **self.engine})
            module = [sys.executable, "-m", "moestro.cli.bench.resident"]
            return [*module, str(self.model), *tail, "--engine", engine]
        peer = PEERS[name]
        model = self.model
        if peer.gguf:
            assert self.gguf is not None
            model = self.gguf / GGUF_FILES[weights]
            if not model.exists():
                raise ConfigError(f"{model} is missing: run bench/peers/make_gguf.py.")
        worker: list[str] = self.record[peer.install]["worker"]
        return [*worker, str(model), *tail, *peer.flags]

    def asked(self, name: str, weights: str) -> list[str]:
        """The measures that an engine takes part in, beside our weights of a format."""
        if name == OURS:
            return list(self.measures)
        peer = PEERS[name]
        able = peer.measures if peer.gguf or weights == "bf16" else peer.others
        return [m for m in self.measures if m in able]


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    start_logging(args)
    report.check_output(args.output)
    report.check_chart(args.chart)
    request = Request.of(args)
    spec = load_model_spec(request.model)
    load = os.getloadavg()[0]
    if load > BUSY:
        note(
            f"warning: the machine is busy (load {load:.1f}). Engines whose threads spin suffer "
            "more than others from company: take no figure of this run for a comparison."
        )
    result = {
        "benchmark": "peers",
        "load_average": load,
        **measure(request, spec),
        **report.circumstances(args.command_line),
    }
    report.conclude(args, result, report.print_peers)
    if args.chart:
        report.draw_ratios(result["rows"], args.chart)
    return 0


def measure(request: Request, spec: ModelSpec) -> dict[str, Any]:
    """All formats, one after the other; engines of the checkpoint stay through all of them."""
    from moestro.backends import load_backend

    limits = measure_limits(request.threads)
    load_backend("cpu").set_num_threads(request.threads)  # of the bandwidth between the rounds
    rows: list[dict[str, Any]] = []
    engines: dict[str, Any] = {}
    with ExitStack() as lasting:
        kept: dict[str, Worker] = {}
        for weights in request.formats:
            with ExitStack() as passing:
                workers: dict[str, Worker] = {}
                for name in (OURS, *request.peers):
                    asked = request.asked(name, weights)
                    if not asked:
                        continue
                    own = name in (OURS, ONE_THREAD) or PEERS[name].gguf
                    stack = passing if own else lasting
                    worker = kept.get(name) or _start(request, name, weights, asked, stack)
                    if stack is lasting:
                        kept[name] = worker
                    workers[name] = worker
                    engines[f"{name} {weights}"] = {**worker.memory(), "told": worker.greeting}
                for each in request.measures:
                    taking = [n for n in workers if each in request.asked(n, weights)]
                    rows.append(_row(request, spec, limits, (weights, each), taking, workers))
    peers = [n for n in request.peers if n != ONE_THREAD]
    return {
        "model": str(request.model),
        "threads": request.threads,
        "pairs": request.pairs,
        "limits": asdict(limits),
        "peers": {n: versions(request.record[PEERS[n].install]) for n in peers},
        "rows": rows,
        "engines": engines,
    }


def _start(
    request: Request, name: str, weights: str, asked: Sequence[str], stack: ExitStack
) -> Worker:
    note(f"{weights}: loading {name}")
    command = request.command(name, weights)
    # Batches come last, and outside what is taken as peak memory of one sequence.
    first = [MEASURES[m].command for m in asked if MEASURES[m].batch == 1]
    try:
        worker = Worker(name, command, first)
    except MoestroError as error:
        raise MoestroError(f"{error} It was started as: {shlex.join(command)}") from error
    stack.callback(worker.close)
    return worker


def _row(
    request: Request,
    spec: ModelSpec,
    limits: Limits,
    what: tuple[str, str],
    taking: Sequence[str],
    workers: dict[str, Worker],
) -> dict[str, Any]:
    weights, name = what
    measure = MEASURES[name]
    tokens = dict.fromkeys(taking, measure.tokens)

    def ask(engine: str) -> float:
        answer = workers[engine].ask(measure.command)
        # An engine that counts its own tokens is timed for as many as the others make.
        made = float(answer.get("tokens", measure.tokens))
        return float(answer["seconds"]) * measure.tokens / made

    for engine in taking:
        ask(engine)
    rounds: list[Round] = []
    title = f"{weights} {name}"
    if not sys.stderr.isatty():
        note(f"{datetime.datetime.now():%H:%M:%S} {title}")
    with report.progress(title, request.pairs) as advance:
        for each in measure_rounds(ask, taking, read_bandwidth, request.pairs):
            rounds.append(each)
            advance()
    bounds = {e: _bound(spec, limits, measure, e, weights) for e in taking}
    return {"format": weights, "measure": name, **summary(rounds, OURS, tokens, bounds)}


def _bound(
    spec: ModelSpec, limits: Limits, measure: Measure, engine: str, weights: str
) -> Callable[[float], float]:
    """Least seconds of a measure, given bytes a second: of reading, or of computing if longer.

    Operations are those of the format that is multiplied: bf16, or 8-bit integers.
    """
    if engine in (OURS, ONE_THREAD):
        storage = bound.OURS[weights]
    elif PEERS[engine].gguf:
        storage = bound.GGUF[weights]
    else:
        storage, weights = bound.OURS["bf16"], "bf16"
    read, operations = measure.work(spec, storage)
    peak = limits.bf16_flops_per_s if weights == "bf16" else limits.int8_ops_per_s
    return lambda bandwidth: max(read / bandwidth, operations / peak)
