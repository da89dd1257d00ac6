"""`moestro bench throughput`: prefill and decode speed of one batch."""

import argparse
import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from moestro.cli.bench import report
from moestro.cli.bench.memory import PeakMemory, peak_rss_bytes, resident_bytes
from moestro.cli.bench.statistics import median, percentile
from moestro.cli.console import add_common_flags, aligned, print_json, start_logging, write_text
from moestro.cli.sampling_flags import (
    add_sampling_flags,
    refuse_without_effect,
    sampling_overrides_from_args,
)
from moestro.config import EngineConfig, add_engine_flags, engine_config_from_args
from moestro.core.messages import StepReport
from moestro.core.sampling_params import SamplingParams
from moestro.errors import CapacityError, ConfigError, GenerationError

if TYPE_CHECKING:
    from moestro.core.plan import Plan
    from moestro.engine.built_engine import BuiltEngine

HELP = "prefill and decode speed of one batch"
DESCRIPTION = (
    "Runs a batch of random token prompts of one exact length and generates to one exact length, "
    "greedily unless sampling flags say otherwise, without a tokenizer. Prefill lasts until every "
    "sequence has its first token; decode steps are those in which the whole batch gets a token. "
    "Every run draws prompts of its own, so the prefix cache never helps."
)

_COUNTS = (
    ("--input-len", 512, "tokens of a prompt"),
    ("--output-len", 64, "tokens generated for a sequence"),
    ("--batch-size", 1, "sequences at once"),
    ("--repeats", 3, "measured runs"),
    ("--warmup", 1, "runs before the measured ones; 0 is none"),
)
_DEFAULTS = {
    **dict.fromkeys(("temperature", "min_p"), "0"),
    **dict.fromkeys(("top_p", "repetition_penalty"), "1"),
    "top_k": "0",
    "max_tokens": "--output-len",
    "ignore_eos": "on",
    "detokenize": "off",
}
_NO_TEXT = "no text is made"
_FIXED = {
    **dict.fromkeys(("max_tokens", "min_tokens"), "--output-len is the length of every sequence"),
    **dict.fromkeys(("ignore_eos", "stop_token_ids"), "every sequence runs to --output-len"),
    **dict.fromkeys(("detokenize", "stop", "include_stop_str_in_output"), _NO_TEXT),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), _NO_TEXT),
    "n": "--batch-size is the number of sequences",
}
"""Sampling fields that would break the exact lengths, or that change nothing, and why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moestro bench throughput`."""
    group = parser.add_argument_group("Benchmark")
    for flag, default, text in _COUNTS:
        group.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    add_engine_flags(parser)
    add_sampling_flags(parser, _DEFAULTS)
    add_common_flags(parser, json_help="print the result as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    start_logging(args)
    load = Workload.of(args)
    params = sampling_of(load, sampling_overrides_from_args(args))
    config = replace(engine_config_from_args(args), skip_tokenizer_init=True)
    result = {**measure(config, load, params), **report.circumstances(args.command_line)}
    if args.json:
        print_json(result)
    else:
        write_text("\n".join(_lines(result)) + "\n")
    return 0


@dataclass(frozen=True, slots=True)
class Workload:
    """What is run: lengths in tokens."""

    input_len: int
    output_len: int
    batch_size: int
    repeats: int
    warmup: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Workload":
        """From flags. Raises ConfigError."""
        for flag, _, _ in _COUNTS:
            value = getattr(args, flag[2:].replace("-", "_"))
            least = 0 if flag == "--warmup" else 1
            if value < least:
                raise ConfigError(f"{flag} must be at least {least}, got {value}.")
        return cls(args.input_len, args.output_len, args.batch_size, args.repeats, args.warmup)

    def check(self, plan: "Plan") -> None:
        """Raises ConfigError or CapacityError when the batch can't run as one."""
        if self.batch_size > plan.max_num_seqs:
            raise ConfigError(
                f"--batch-size {self.batch_size} is more than max_num_seqs {plan.max_num_seqs}: "
                "the batch would not run at once. Raise --max-num-seqs."
            )
        tokens = self.input_len + self.output_len
        pages = -(-tokens // plan.page_size) * self.batch_size
        if pages > plan.num_pages:
            needed = pages * plan.page_size * plan.kv_bytes_per_token
            raise CapacityError(
                f"{self.batch_size} sequences of {tokens} tokens need {pages} KV pages, and there "
                f"are {plan.num_pages}: set --kv-cache-memory-bytes to at least {needed}, or make "
                "the batch or the lengths smaller."
            )


def sampling_of(load: Workload, overrides: Mapping[str, Any]) -> SamplingParams:
    """How tokens are drawn. Raises ConfigError for a flag that this benchmark can't honour."""
    exact = SamplingParams(
        temperature=0.0, max_tokens=load.output_len, ignore_eos=True, detokenize=False
    )
    refuse_without_effect(overrides, exact, _FIXED)
    return exact.with_(**overrides)


@dataclass(slots=True)
class RunTimes:
    """One run: seconds until every sequence had a token, and of each full decode step."""

    prefill_s: float
    decode_steps_s: list[float] = field(default_factory=list)


def measure(config: EngineConfig, load: Workload, params: SamplingParams) -> dict[str, Any]:
    """Load, warm up, measure; the result as it is printed with --json."""
    before = resident_bytes()
    with PeakMemory() as memory:
        started = time.perf_counter()
        built = _build(config)
        load_s = time.perf_counter() - started
        try:
            load.check(built.plan)
            runs = _run_all(built, load, params, config.seed)
        finally:
            built.engine.close()
    return {
        "benchmark": "throughput",
        "model": config.model,
        "quantization": config.quantization,
        **asdict(load),
        "sampling_params": asdict(params),
        "seed": config.seed,
        **_speeds(runs, load),
        "load_s": load_s,
        "peak_memory_bytes": memory.peak_bytes,
        "memory_before_bytes": before,
        "peak_rss_bytes": peak_rss_bytes(),
        "plan": built.plan.to_dict(),
    }


def run_once(
    built: "BuiltEngine", load: Workload, params: SamplingParams, draw: random.Random, name: str
) -> RunTimes:
    """One batch from its first step to its last."""
    engine, vocab_size = built.engine, built.spec.vocab_size
    for n in range(load.batch_size):
        ids = [draw.randrange(vocab_size) for _ in range(load.input_len)]
        engine.add_request(
            built.processor.process(ids, params, request_id=f"{name}-{n}", strict_max_tokens=True)
        )
    started = time.perf_counter()
    waiting = {f"{name}-{n}" for n in range(load.batch_size)}
    times: RunTimes | None = None
    while engine.has_work():
        step_started = time.perf_counter()
        report = engine.step()
        now = time.perf_counter()
        _check_failed(report)
        gained = {d.request_id for d in report.deltas if d.token_ids}
        if times is not None and len(gained) == load.batch_size:
            times.decode_steps_s.append(now - step_started)
        waiting -= gained
        if times is None and not waiting:
            times = RunTimes(now - started)
    assert times is not None
    return times


def _check_failed(report: StepReport) -> None:
    """A batch without one of its sequences would measure something else."""
    for delta in report.deltas:
        if delta.error is not None:
            raise GenerationError(f"The batch can't be run to its end: {delta.error}")


def _build(config: EngineConfig) -> "BuiltEngine":
    from moestro.cli.loading_bar import loading_bar
    from moestro.engine.build import build_engine

    with loading_bar() as (progress, captured):
        return build_engine(config, progress, captured)


def _run_all(
    built: "BuiltEngine", load: Workload, params: SamplingParams, seed: int
) -> list[RunTimes]:
    draw = random.Random(seed)
    measured = []
    with report.progress("runs", load.warmup + load.repeats) as advance:
        for n in range(load.warmup + load.repeats):
            times = run_once(built, load, params, draw, f"run-{n}")
            if n >= load.warmup:
                measured.append(times)
            advance()
    return measured


def _speeds(runs: list[RunTimes], load: Workload) -> dict[str, Any]:
    prefill = median([r.prefill_s for r in runs])
    steps = [s for r in runs for s in r.decode_steps_s]
    told: dict[str, Any] = {
        "prefill_tokens_per_s": load.batch_size * load.input_len / prefill,
        "prefill_ms": [r.prefill_s * 1e3 for r in runs],
        "decode_tokens_per_s": None,
        "decode_step_ms": None,
        "num_decode_steps": len(steps),
    }
    if steps:
        told["decode_tokens_per_s"] = load.batch_size * len(steps) / sum(steps)
        told["decode_step_ms"] = {
            "min": min(steps) * 1e3,
            "median": median(steps) * 1e3,
            "p90": percentile(steps, 0.9) * 1e3,
            "max": max(steps) * 1e3,
        }
    return told


def _lines(result: dict[str, Any]) -> list[str]:
    """The result for people."""
    rows = [
        ("model", f"{result['model']} ({result['plan']['dtype']})"),
        ("prefill", f"{result['prefill_tokens_per_s']:,.1f} tokens/s"),
    ]
    if result["decode_step_ms"] is not None:
        step = ", ".join(f"{k} {v:.2f}" for k, v in result["decode_step_ms"].items())
        rows += [
            ("decode", f"{result['decode_tokens_per_s']:,.1f} tokens/s"),
            ("decode step, ms", step),
        ]
    rows += [
        ("peak memory", f"{result['peak_memory_bytes'] / 1e9:.3f} GB (RssAnon + RssShmem)"),
        ("peak RSS", f"{result['peak_rss_bytes'] / 1e9:.3f} GB (VmHWM, mapped files included)"),
        ("machine", f"{result['machine']['cpu']}, {result['plan']['num_threads']} threads"),
        ("kernels", str(result["versions"]["kernels"])),
    ]
    return aligned(rows)
