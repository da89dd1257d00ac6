"""What planning ahead hides: the engine's own work beside a device that only takes time.

    python bench/overlap.py [--step-ms 5 10 20] [--batch 64] [--steps 200] [--rounds 3] [--json]
    python bench/overlap.py --real [--model tiny-hy3] [--batch 8] [--threads 2] [--rounds 7]

The device sleeps for a step's time without the GIL; planning, correction, text, stop strings and
reports are the engine's own, with tiny-hy3's tokenizer. Sync and async runs alternate. hidden =
(sync - async) / (sync - device): the share of the time that a step takes beyond the device's which
planning ahead takes away. --real: whole runs of the CPU engine, async over sync.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

from moestro.config import EngineConfig
from moestro.core.request import Request
from moestro.core.sampling_params import SamplingParams
from moestro.engine.engine import Engine
from moestro.engine.request_progress import RequestProgress
from moestro.engine.step_times import StepTimes
from moestro.engine.tokenizer import Tokenizer
from moestro.kvcache import KVCacheManager
from moestro.scheduler import FixedDrafts, Scheduler, SchedulerLimits
from moestro.simulator.virtual_device import ScriptedSpeech, VirtualDevice

_WARM_STEPS = 8


def make_request(name: str, max_tokens: int) -> Request:
    """Streams text, may end by a stop string or token, and never does."""
    first = sum(name.encode())
    params = SamplingParams(max_tokens=max_tokens, stop=("never said",), logprobs=1)
    return Request(
        request_id=name,
        prompt_token_ids=tuple((first + i) % 200 for i in range(64)),
        params=params,
        seed=first,
        max_tokens=max_tokens,
        stop_token_ids=frozenset((1, 2)),
        eos_token_ids=frozenset((1, 2)),
    )


def run_virtual(
    tokenizer: Tokenizer, ahead: int, step_s: float, options: argparse.Namespace
) -> dict[str, float]:
    """Medians of one run's decode steps, in seconds."""
    batch, steps, num_drafts = options.batch, options.steps, options.drafts
    length = (steps + 2 * _WARM_STEPS) * (1 + num_drafts)
    kv = KVCacheManager(batch * (-(-(80 + length) // 64) + 2), 64)
    scheduler = Scheduler(
        SchedulerLimits(batch, 1 << 14, 1 << 16, ahead),
        kv,
        drafts=FixedDrafts(num_drafts) if num_drafts else None,
    )
    speech = ScriptedSpeech(tokenizer.vocab_size, options.acceptance)
    times: list[StepTimes] = []
    engine = Engine(
        scheduler, VirtualDevice(lambda _: step_s, speech), tokenizer, observer=times.append
    )
    requests = [make_request(f"r{n}", length) for n in range(batch)]
    progress = {request.request_id: RequestProgress(request) for request in requests}
    for request in requests:
        engine.add_request(request)
    ends = []
    while len(ends) < steps + _WARM_STEPS:
        for delta in engine.step().deltas:
            progress[delta.request_id].add(delta)
            progress[delta.request_id].output()
        ends.append(time.monotonic())
    engine.close()
    decodes = times[_WARM_STEPS : _WARM_STEPS + steps]
    devices = [t.device[1] - t.device[0] for t in decodes]
    gaps = [b.device[0] - a.device[1] for a, b in pairwise(decodes)]
    took = [b - a for a, b in pairwise(ends[_WARM_STEPS:])]
    return {
        "step_s": statistics.mean(took),
        "device_s": statistics.mean(devices),
        "bubble_s": statistics.mean(gaps),
    }


def overlap(options: argparse.Namespace) -> list[dict[str, float]]:
    """One row a step time: means over rounds."""
    from moestro.weights.source import resolve_model

    tokenizer = Tokenizer.load(resolve_model("tiny-hy3", with_weights=False), None)
    rows = []
    for step_ms in options.step_ms:
        runs: dict[int, list[dict[str, float]]] = {0: [], 1: []}
        for _ in range(options.rounds):
            for ahead in (0, 1):
                runs[ahead].append(run_virtual(tokenizer, ahead, step_ms / 1e3, options))
        sync, planned = (
            {key: statistics.median(run[key] for run in runs[ahead]) for key in runs[ahead][0]}
            for ahead in (0, 1)
        )
        host_s = sync["step_s"] - sync["device_s"]
        fits_s = min(host_s, planned["device_s"])
        rows.append(
            {
                "step_ms": step_ms,
                "sync_ms": 1e3 * sync["step_s"],
                "async_ms": 1e3 * planned["step_s"],
                "host_ms": 1e3 * host_s,
                "sync_bubble_ms": 1e3 * sync["bubble_s"],
                "async_bubble_ms": 1e3 * planned["bubble_s"],
                "hidden": 1 - (planned["step_s"] - planned["device_s"]) / fits_s,
            }
        )
    return rows


def run_real(engine: Engine, requests: Sequence[Request]) -> float:
    """Seconds from the first step to the last token."""
    progress = {request.request_id: RequestProgress(request) for request in requests}
    for request in requests:
        engine.add_request(request)
    began_s = time.monotonic()
    while engine.has_work():
        for delta in engine.step().deltas:
            progress[delta.request_id].add(delta)
    return time.monotonic() - began_s


def real(options: argparse.Namespace) -> dict[str, float]:
    """Two engines of one model in turn, sync and async; tokens/s and the ratio of pairs."""
    from moestro.engine.build import build_engine

    engines = {
        ahead: build_engine(
            EngineConfig.from_kwargs(
                model=options.model, num_threads=options.threads, async_scheduling=bool(ahead)
            )
        )
        for ahead in (0, 1)
    }
    seconds: dict[int, list[float]] = {0: [], 1: []}
    for turn in range(options.rounds + 1):
        for ahead in (0, 1) if turn % 2 else (1, 0):
            requests = [make_request(f"{turn}.{n}", options.steps) for n in range(options.batch)]
            took = run_real(engines[ahead].engine, requests)
            if turn:
                seconds[ahead].append(took)
    for built in engines.values():
        built.engine.close()
    num_tokens = options.batch * options.steps
    ratios = [a / b for a, b in zip(seconds[0], seconds[1], strict=True)]
    return {
        "sync_tokens_per_s": num_tokens / statistics.median(seconds[0]),
        "async_tokens_per_s": num_tokens / statistics.median(seconds[1]),
        "ratio": statistics.median(ratios),
        "lowest_ratio": min(ratios),
        "highest_ratio": max(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[5.0, 10.0, 20.0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--model", default="tiny-hy3")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = [real(options)] if options.real else overlap(options)
    if options.json:
        print(json.dumps(found))
        return
    for row in found:
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))


if __name__ == "__main__":
    main()
