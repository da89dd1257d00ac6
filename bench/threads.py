"""What the kernels' threads cost, and what is kept when they outnumber the cores.

    python bench/threads.py [--model tiny-hy3] [--pairs 12] [--seconds 1.0] [--json FILE]

Regions: microseconds of a parallel region over the time of its tasks, two threads.
Ratios: decoded tokens a second against one engine with as many threads as there are cores, in
alternating pairs (base, other), medians: twice the threads; two engines in two processes; two
engines in one process. Idle: share of one core that an engine, and `moestro serve`, use while
nobody asks anything.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moestro import LLM, SamplingParams
from moestro.backends.cpu import machine
from moestro.backends.cpu.library import native
from moestro.cli.machine import machine_facts, version_facts

PROMPT = [list(range(100, 132))]


class Engines:
    """One process with `count` engines that decode when told to."""

    def __init__(self, model: str, count: int, threads: int) -> None:
        arguments = ("--worker", str(count), "--threads", str(threads), "--model", model)
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self._read()

    def start(self, seconds: float) -> None:
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin, flush=True)

    def rate(self) -> float:
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a worker ended")
        return line

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def work(model: str, count: int, threads: int) -> None:
    """The worker: a line of seconds on stdin, a line of tokens a second on stdout."""
    options: dict[str, Any] = {"num_threads": threads, "kv_cache_memory_bytes": 2**26}
    engines = [LLM(model, skip_tokenizer_init=True, **options) for _ in range(count)]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, detokenize=False)

    def decode(engine: LLM, until: float, made: list[float]) -> None:
        tokens, began = 0, time.perf_counter()
        while time.perf_counter() < until:
            for output in engine.generate(PROMPT, params, use_tqdm=False):
                tokens += len(output.outputs[0].token_ids)
        made.append(tokens / (time.perf_counter() - began))

    for engine in engines:
        decode(engine, time.perf_counter() + 0.2, [])
    print("ready", flush=True)
    for line in sys.stdin:
        made: list[float] = []
        until = time.perf_counter() + float(line)
        running = [threading.Thread(target=decode, args=(e, until, made)) for e in engines]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        print(sum(made), flush=True)


def regions() -> dict[str, float]:
    """Microseconds over the tasks' own time, two threads: one and eight tasks a thread."""
    native().set_num_threads(2)
    count, work_length = 2000, 2000
    told = {}
    for tasks in (1, 8):
        over = []
        for _ in range(15):
            alone = machine.region_seconds(count, 1, work_length)
            both = machine.region_seconds(count, 2 * tasks, work_length)
            over.append((both - tasks * alone) / count * 1e6)
        told[f"{tasks} a thread"] = statistics.median(over)
    return told


def ratios(model: str, pairs: int, seconds: float) -> dict[str, dict[str, float]]:
    """Each arrangement's tokens a second against the base's, and the base's."""
    cores = len(os.sched_getaffinity(0))
    base = Engines(model, 1, cores)
    others = {
        f"{2 * cores} threads": [Engines(model, 1, 2 * cores)],
        "two processes": [base, Engines(model, 1, cores)],
        "two engines in a process": [Engines(model, 2, cores)],
    }
    told = {}
    for name, group in others.items():
        found = []
        for _ in range(pairs):
            one = _rate([base], seconds)
            found.append((_rate(group, seconds) / one, one))
        told[name] = {
            "ratio": statistics.median(ratio for ratio, _ in found),
            "lowest": min(ratio for ratio, _ in found),
            "base tokens/s": statistics.median(one for _, one in found),
        }
    told["idle engine"] = {"share of a core": _idle_share(base.pid, 3.0)}
    for engines in {id(e): e for group in others.values() for e in group}.values():
        engines.close()
    return told


def _rate(group: list[Engines], seconds: float) -> float:
    for engines in group:
        engines.start(seconds)
    return sum(engines.rate() for engines in group)


def _idle_share(pid: int, seconds: float) -> float:
    time.sleep(0.5)
    before = _cpu_seconds(pid)
    time.sleep(seconds)
    return (_cpu_seconds(pid) - before) / seconds


def _cpu_seconds(pid: int) -> float:
    """Of all threads of a process, in nanosecond steps; those of its children are not in it."""
    paths = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in paths) / 1e9


def idle_server(model: str, seconds: float) -> float:
    """Share of a core that a server uses after it has answered one request."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = (sys.executable, "-m", "moestro", "serve", model, "--port", str(port))
    server = subprocess.Popen([*command, "--kv-cache-memory-bytes", "64MiB"])
    try:
        body = json.dumps({"model": model, "prompt": "x = ", "max_tokens": 8}).encode()
        ask = _retried(lambda: _post(f"http://127.0.0.1:{port}/v1/completions", body))
        assert ask, "the server does not answer"
        return _idle_share(server.pid, seconds)
    finally:
        server.terminate()
        server.wait(30)


def _post(url: str, body: bytes) -> bool:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bool(answer.read())


def _retried(ask: Callable[[], bool]) -> bool:
    for _ in range(120):
        try:
            return ask()
        except OSError:
            time.sleep(0.5)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-hy3")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.model, args.worker, args.threads)
        return
    told: dict[str, Any] = {"region_us": regions()}
    told.update(ratios(args.model, args.pairs, args.seconds))
    told["idle server"] = {"share of a core": idle_server(args.model, 5.0)}
    for name, figures in told.items():
        print(name + ": " + ", ".join(f"{k} {v:.4g}" for k, v in figures.items()))
    if args.json:
        told.update(machine=machine_facts(), versions=version_facts(), pairs=args.pairs)
        args.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
