"""One measured piece of work: our call, the others', and what it reads and computes at least."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moestro.backends import load_backend
from moestro.cli.bench.limits import Limits, read_bandwidth
from moestro.cli.bench.pairing import Round, summary
from moestro.core.weight_format import WeightFormat
from moestro.quant.format import WeightTensor
from moestro.quant.weight import expert, quantize

Call = Callable[[int], object]

OURS = "moestro"
COLD_BYTES = 2**27
"""Weights and KV rotate over copies of so many bytes in all, more than most caches hold."""
FEWEST = 3
ATTEMPTS = 3
PAUSE_S = 0.02
"""Longer than OpenMP's threads spin after a parallel region (6 ms measured)."""
WAKE_S = 0.01
"""A woken thread may sit on its caller's core until the system moves it: milliseconds."""
SHORTEST_S = 0.002


@dataclass(frozen=True, slots=True)
class Work:
    """Calls take the number of the repetition. unit: fp32, bf16 or int8, whose peak bounds it."""

    group: str
    name: str
    ours: Call
    others: Mapping[str, Call]
    read_bytes: float
    operations: float
    unit: str = "bf16"

    def bound_s(self, limits: Limits, bytes_per_s: float) -> float:
        """Seconds at the machine's limits."""
        peak = {
            "fp32": limits.fp32_flops_per_s,
            "bf16": limits.bf16_flops_per_s,
            "int8": limits.int8_ops_per_s,
        }[self.unit]
        return max(self.read_bytes / bytes_per_s, self.operations / peak)


class Bandwidth:
    """Bytes a second read before and after a row; the after of one is the next one's before."""

    def __init__(self) -> None:
        self._last: float | None = None

    def before(self) -> float:
        return self.after() if self._last is None else self._last

    def after(self) -> float:
        self._last = read_bandwidth()
        return self._last


def measure_work(
    work: Work, limits: Limits, bandwidth: Bandwidth, seconds: float
) -> dict[str, Any]:
    """Alternating calls for `seconds`, three each at least; again where memory was unsteady."""
    calls = {OURS: work.ours, **work.others}
    for call in calls.values():
        call(0)
    rounds: list[Round] = []
    for _ in range(ATTEMPTS):
        before = bandwidth.before()
        made = _rounds(calls, seconds)
        after = bandwidth.after()
        rounds = [Round(r, before, after) for r in made]
        if rounds[0].is_steady:
            break
    bound = {OURS: lambda measured: work.bound_s(limits, measured)}
    told = summary(rounds, OURS, dict.fromkeys(calls, 1), bound)
    for engine in told["engines"].values():
        engine["seconds"] = 1 / engine.pop("tokens_per_s")
        del engine["rates"]
    shared = {"group": work.group, "name": work.name, "unit": work.unit}
    return {**shared, "read_bytes": work.read_bytes, "operations": work.operations, **told}


def _rounds(calls: Mapping[str, Call], seconds: float) -> list[dict[str, float]]:
    """Every round asks each call once, in an order of its own, so that nobody has the same
    neighbour each time: it would find the other's data in the cache, or its threads still spinning.
    """
    turns = {name: Turn(call) for name, call in calls.items()}
    order, draw = list(calls), random.Random(0)
    made: list[dict[str, float]] = []
    start = time.perf_counter()
    while len(made) < FEWEST or time.perf_counter() - start < seconds:
        draw.shuffle(order)
        made.append({name: turns[name].seconds() for name in order})
    return made


class Turn:
    """Times one call when it is its turn: after a pause in which the threads of others fall asleep
    and, where it is short, untimed calls that wake its own, over as many calls as fill SHORTEST_S.
    Every call takes the next number, and so the data that was used longest ago.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._number = 0
        first_s = self._time(1)
        self._is_short = first_s < WAKE_S
        self._repeats = 1 + int(SHORTEST_S / first_s)

    def seconds(self) -> float:
        time.sleep(PAUSE_S)
        began = time.perf_counter()
        while self._is_short and time.perf_counter() - began < WAKE_S:
            self._time(1)
        return self._time(self._repeats)

    def _time(self, repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            self._number += 1
            self._call(self._number)
        return (time.perf_counter() - began) / repeats


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """bf16 numbers of a normal distribution."""
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=scale)


def format_named(name: str) -> WeightFormat:
    """bf16, fp32, w8a8, w4a8 (groups of 32) or fp8 (a scale a row)."""
    plain = {"bf16": "bfloat16", "fp32": "float32"}.get(name, name)
    return WeightFormat(plain, group_size=32) if name == "w4a8" else WeightFormat(plain)


def packed(values: torch.Tensor, name: str, *, paired: bool = False) -> WeightTensor:
    """Weights in a format, in the layout that the device's kernels read: as a model loads them."""
    rows = quantize(values, format_named(name), paired=paired)
    device = load_backend("cpu")
    if not device.packs_weights:
        return rows
    size = device.packed_bytes(rows.format, rows.shape, paired=paired)
    buffer = torch.empty(size, dtype=torch.uint8)
    target = WeightTensor(rows.format, rows.shape, buffer, packed=True, paired=paired)
    if rows.num_experts is None:
        device.pack_rows(target, rows, expert=None, start=0)
    else:
        for index in range(rows.num_experts):
            device.pack_rows(target, expert(rows, index), expert=index, start=0)
    return target


def unit_of(name: str) -> str:
    """The multiplication that a format ends in."""
    return {"w8a8": "int8", "w4a8": "int8", "fp32": "fp32"}.get(name, "bf16")
