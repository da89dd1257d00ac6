"""Decode through Python and through captured graphs, in alternating steps of one model.

    python bench/graph.py [--model tiny-hy3] [--batch-size 1 8] [--steps 100] [--profile] [--json]

Two runners share the weights; each step is run by both, in turns. `eager`, `graph`: all of
ModelRunner.execute, greedy sampling included; `replay`: the native call inside it. Host time
outside kernels, a layer: eager as the difference to the replayed step, replay as the time of as
many calls that compute nothing (a router call for no token: look-up, argument check, return).
Medians, microseconds. --profile: also where a replay's time goes, op by op, and how fast the
weights of each are read (of the experts, those that uniform choices would use).
"""

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from moestro.backends import load_backend
from moestro.backends.base import CapturedStep, GraphPool
from moestro.backends.cpu import library
from moestro.backends.cpu.arguments import RouterArgs
from moestro.backends.cpu.graph import CapturedStep as NativeStep
from moestro.cli.bench.bound import experts_used
from moestro.config import EngineConfig
from moestro.core.sampling_params import SamplingParams
from moestro.core.step import NewSequence, Schedule, ScheduledSequence
from moestro.engine.build import LoadedModel, load_model
from moestro.runner.kv_pool import KVPool
from moestro.runner.model_runner import ModelRunner

PROMPT = 32
PAGE_SIZE = 64
ROUTER_PANEL = 32  # experts whose weights lie together
GREEDY = SamplingParams(temperature=0.0)


class Remembering:
    """A GraphPool that keeps what it captured."""

    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool
        self.last: CapturedStep | None = None

    @property
    def num_bytes(self) -> int:
        return self._pool.num_bytes

    def apart(self) -> GraphPool:
        return self._pool.apart()

    def capture(self, step: Callable[[], Any]) -> CapturedStep:
        self.last = self._pool.capture(step)
        return self.last


class Batch:
    """Sequences that decode together on one runner."""

    def __init__(self, runner: ModelRunner, size: int, num_pages: int) -> None:
        self._runner, self._size = runner, size
        each = num_pages // size
        self._pages = [tuple(range(i * each, (i + 1) * each)) for i in range(size)]
        self._at = 0
        self._steps = 0

    def start(self) -> list[tuple[int, ...]]:
        new = tuple(
            NewSequence(i, tuple(range(5 + i, 5 + i + PROMPT)), PROMPT, GREEDY, 0, 0, frozenset())
            for i in range(self._size)
        )
        return self._run(PROMPT, new, self._pages)

    def step(self) -> list[tuple[int, ...]]:
        return self._run(1, (), [()] * self._size)

    def _run(self, count: int, new: tuple[NewSequence, ...], pages: list) -> list[tuple[int, ...]]:
        items = tuple(
            ScheduledSequence(i, self._at, count, pages[i], True) for i in range(self._size)
        )
        self._at += count
        self._steps += 1
        output = self._runner.execute(Schedule(self._steps, items, new))
        return [sequence.token_ids for sequence in output.sequences]


def measure(loaded: LoadedModel, size: int, steps: int, profiled: bool) -> dict:
    """One batch size."""
    pool = load_backend("cpu").graph_pool()
    assert pool is not None
    remembered = Remembering(pool)
    num_pages = size * (-(-(PROMPT + steps + 2) // PAGE_SIZE))
    dtype = getattr(torch, loaded.plan.dtype)

    def batch(graph_pool: Remembering | None) -> Batch:
        kv_pool = KVPool(loaded.spec, num_pages, PAGE_SIZE, dtype)
        options = {"max_num_seqs": size, "max_model_len": PROMPT + steps + 2}
        runner = ModelRunner(loaded.model, kv_pool, graph_pool=graph_pool, **options)
        return Batch(runner, size, num_pages)

    both = {"eager": batch(None), "graph": batch(remembered)}
    assert both["eager"].start() == both["graph"].start()
    assert both["eager"].step() == both["graph"].step()  # captures
    taken: dict[str, list[float]] = {name: [] for name in (*both, "replay")}
    captured = remembered.last
    assert captured is not None
    for number in range(steps):
        tokens = {}
        for name in list(both)[:: 1 if number % 2 else -1]:
            began = time.perf_counter()
            tokens[name] = both[name].step()
            taken[name].append(time.perf_counter() - began)
        assert tokens["eager"] == tokens["graph"]
        began = time.perf_counter()
        captured.replay()  # the same step once more: the same result
        taken["replay"].append(time.perf_counter() - began)
    us = {name: statistics.median(times) * 1e6 for name, times in taken.items()}
    layers = loaded.spec.num_hidden_layers
    return {
        "batch_size": size,
        **{f"{name}_us": value for name, value in us.items()},
        "speedup": statistics.median(
            a / b for a, b in zip(taken["eager"], taken["graph"], strict=True)
        ),
        "calls": captured.num_calls,
        "host_us_a_layer_eager": (us["eager"] - us["graph"]) / layers,
        "host_us_a_layer_replay": empty_call_us() * captured.num_calls / layers,
        "host_us_a_step_graph": us["graph"] - us["replay"],
        "graph_bytes": remembered.num_bytes,
        "ops": profile(captured, steps) if profiled else [],
    }


def profile(captured: CapturedStep, replays: int) -> list[dict]:
    """Each kind of call of a step: how many, the medians of their times added up, bytes read."""
    assert isinstance(captured, NativeStep)
    times = [captured.timed_replay() for _ in range(replays)]
    kinds: dict[str, dict] = {}
    for index, (op, arguments) in enumerate(captured.calls()):
        shape, read = weight_of(op, arguments)
        name = f"{op} {shape}".strip()
        kind = kinds.setdefault(name, {"op": name, "calls": 0, "us": 0.0, "weight_bytes": 0.0})
        kind["calls"] += 1
        kind["us"] += statistics.median(each[index] for each in times) * 1e6
        kind["weight_bytes"] += read
    return sorted(kinds.values(), key=lambda kind: -kind["us"])


def weight_of(op: str, arguments: Any) -> tuple[str, float]:
    """The shape of a call's weights and the bytes that it reads of them."""
    if op == "linear":
        weight = arguments.weight
        size = library.native().packed_bytes(ctypes.byref(weight))
        return f"{weight.num_rows}x{weight.in_features}", size
    if op == "moe_router":
        experts, hidden = arguments.num_experts, arguments.hidden
        panels = -(-experts // ROUTER_PANEL)
        size = panels * ROUTER_PANEL * hidden * (2 * arguments.terms or 4)
        return f"{experts}x{hidden}", size
    if op != "moe_experts":
        return "", 0.0
    size = 0.0
    for weight in (arguments.gate_up, arguments.down):
        used = experts_used(weight.num_experts, arguments.top_k, arguments.num_tokens)
        each = library.native().packed_bytes(ctypes.byref(weight)) / weight.num_experts
        size += used * each
    for weight in (arguments.shared_gate_up, arguments.shared_down):
        if weight.data:
            size += library.native().packed_bytes(ctypes.byref(weight))
    return f"{arguments.gate_up.num_experts}x{arguments.down.in_features}", size


def empty_call_us(calls: int = 1000, repeats: int = 200) -> float:
    """Microseconds of one replayed call that computes nothing."""
    native = library.native()
    graph = native.graph_new()
    arguments = RouterArgs(num_experts=8, top_k=1, hidden=1)
    for _ in range(calls):
        native.graph_append(graph, native.op_code(b"moe_router"), ctypes.byref(arguments))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        assert native.graph_replay(graph) == 0
        times.append(time.perf_counter() - began)
    native.graph_free(graph)
    return statistics.median(times) * 1e6 / calls


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-hy3")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    options = {"model": args.model, "num_threads": args.num_threads, "max_model_len": 4096}
    if args.quantization != "none":
        options["quantization"] = args.quantization
    loaded = load_model(EngineConfig.from_kwargs(**options))
    loaded.model.reserve_positions(4096)
    with torch.inference_mode():
        rows = [measure(loaded, size, args.steps, args.profile) for size in args.batch_size]
    if args.json:
        report = {"device": library.identity(), "model": args.model, "rows": rows, "argv": sys.argv}
        json.dump(report, sys.stdout, indent=2)
        return
    layers = loaded.spec.num_hidden_layers
    print(f"{args.model} ({loaded.plan.dtype}, {layers} layers), {library.identity()}, us a step")
    for row in rows:
        print(
            f"batch {row['batch_size']:>3}: eager {row['eager_us']:.0f}, graph "
            f"{row['graph_us']:.0f} ({row['speedup']:.2f}x), replay {row['replay_us']:.0f} "
            f"({row['calls']} calls); host time a layer: eager "
            f"{row['host_us_a_layer_eager']:.1f}, replay {row['host_us_a_layer_replay']:.3f}; "
            f"arena {row['graph_bytes'] / 1e6:.1f} MB"
        )
        for kind in row["ops"]:
            us, read = kind["us"], kind["weight_bytes"]
            rate = f", {read / 1e6:.1f} MB at {read / us / 1e3:.1f} GB/s" if read else ""
            print(f"    {kind['op']}: {kind['calls']} calls, {us:.1f} us{rate}")


if __name__ == "__main__":
    main()
