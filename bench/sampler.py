"""Moestro's sampler against torch's operators, and vLLM's own where it is installed.

Each option set in alternating pairs on equal logits, which take turns in buffers that no cache
holds together. The bound is one read of the logits at the read bandwidth measured in the same run.
Prints medians, the median paired ratios and the share of the bound; --json writes everything.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "peers"))

from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402
from sampler_cases import CASES, SamplingCase, history_of, logits_of, mask_of  # noqa: E402
from torch_sampler import TorchSampler  # noqa: E402

from moestro import ops  # noqa: E402
from moestro.backends.cpu import library  # noqa: E402
from moestro.cli.bench.machine import measure_machine  # noqa: E402
from moestro.cli.bench.works.work import PAUSE_S  # noqa: E402

BUFFER_BYTES = 96e6
"""Of logits together: more than the last-level cache of a small server."""


def batch_of(case: SamplingCase, rows: int, vocab: int) -> ops.SamplingBatch:
    def column(value: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype)

    metadata = ops.SamplingMetadata(
        column(case.temperature),
        column(case.top_k, torch.int64),
        column(case.top_p),
        column(case.min_p),
        torch.arange(rows),
        column(0, torch.int64),
        column(100, torch.int64),
    )
    mask = counts = None
    if case.masked:
        packed = np.packbits(mask_of(rows, vocab).numpy(), axis=1, bitorder="little")
        mask = ops.TokenMask(torch.arange(rows), torch.from_numpy(packed))
    if case.has_penalties:
        tallies = [np.unique(r, return_counts=True) for r in history_of(case, rows, vocab).numpy()]
        sizes = np.array([len(ids) for ids, _ in tallies])
        flat = [np.concatenate(parts) for parts in zip(*tallies, strict=True)]
        penalties = (column(case.repetition), column(case.frequency), column(case.presence))
        tensors = map(torch.from_numpy, (sizes.cumsum() - sizes, sizes, *flat))
        counts = ops.TokenCounts(*tensors, *penalties)
    wanted = column(case.logprobs, torch.int64) if case.logprobs >= 0 else None
    return ops.SamplingBatch(metadata, None, mask, counts, wanted, max(case.logprobs, 0))


class Vllm:
    """vLLM's sampler in a process of its own."""

    def __init__(self, python: str, threads: int) -> None:
        script = HERE / "peers" / "vllm_sampler_worker.py"
        self.process = subprocess.Popen(
            [python, str(script), "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.versions = self._read()["versions"]

    def ask(self, **command: Any) -> float | None:
        """Seconds of one call, None when it can't."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": "sample", **command}) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        if "error" in answer:
            print(f"vllm, {command['case']}: {answer['error']}", file=sys.stderr)
        return answer.get("seconds")

    def quit(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write('{"do": "quit"}\n')
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args} ended early")
        answer: dict[str, Any] = json.loads(line)
        return answer


def timed(call: Any, warm_logits: Any, logits: Any, *more: Any) -> float:
    """Seconds of a call once the threads of the one before are asleep and its own awake."""
    time.sleep(PAUSE_S)
    call(warm_logits, *more)
    begin = time.perf_counter()
    call(logits, *more)
    return time.perf_counter() - begin


def compare(
    case: SamplingCase, rows: int, vocab: int, pairs: int, vllm: Vllm | None
) -> dict[str, Any]:
    count = max(2, int(BUFFER_BYTES / (4 * rows * vocab)))
    buffers = [logits_of(case, rows, vocab, seed) for seed in range(count)]
    batch, peer = batch_of(case, rows, vocab), TorchSampler(case, rows, vocab)
    seconds: dict[str, list[float]] = {"moestro": [], "torch": [], "vllm": []}

    def run(name: str, turn: int) -> float | None:
        if name == "vllm":
            assert vllm is not None
            where = {"case": case.name, "rows": rows, "vocab": vocab}
            return vllm.ask(**where, buffers=count, turn=turn)
        logits, warm = buffers[turn % count], buffers[(turn + count // 2) % count]
        if name == "torch":
            return timed(peer.sample, warm.clone(), logits.clone())  # it overwrites them
        return timed(ops.sample, warm, logits, batch)

    names = ["moestro", "torch"] + (["vllm"] if vllm else [])
    names = [n for n in names if run(n, 0) is not None]
    for pair in track(range(pairs), description=case.name, console=Console(stderr=True)):
        for name in names if pair % 2 == 0 else names[::-1]:
            taken = run(name, pair)
            assert taken is not None
            seconds[name].append(taken)
    ours = seconds["moestro"]
    return {
        "case": case.name,
        "shape": [rows, vocab],
        "seconds": {n: statistics.median(seconds[n]) for n in names},
        "ratio": {
            n: statistics.median(b / a for a, b in zip(ours, seconds[n], strict=True))
            for n in names[1:]
        },
        "all_seconds": {n: seconds[n] for n in names},
    }


def show(report: dict[str, Any]) -> None:
    limits = report["machine"]
    table = Table(
        title=f"Sampler, {limits['num_threads']} threads, {limits['level']}, read "
        f"{limits['read_gbps']:.0f} GB/s, {report['pairs']} alternating pairs"
    )
    for column in ("rows x vocab", "options", "ms", "of the bound", "torch ms", "torch / ours"):
        table.add_column(column, justify="left" if column == "options" else "right")
    if report["vllm"]:
        table.add_column("vLLM ms", justify="right")
        table.add_column("vLLM / ours", justify="right")
    for r in report["results"]:
        ms = {name: f"{1e3 * s:.3f}" for name, s in r["seconds"].items()}
        cells = ["{} x {}".format(*r["shape"]), r["case"], ms["moestro"], f"{r['of_bound']:.0%}"]
        for name in ("torch", "vllm"):
            if name in ms:
                cells += [ms[name], f"{r['ratio'][name]:.1f}"]
        table.add_row(*cells)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm-python", help="python of an environment with vLLM")
    parser.add_argument("--cases", nargs="*", help="only these option sets")
    parser.add_argument("--json", type=Path, help="write the report here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library.native().set_num_threads(args.threads)
    limits = measure_machine(args.threads)
    vllm = Vllm(args.vllm_python, args.threads) if args.vllm_python else None
    results = []
    for rows, vocab in ((32, 120_832), (1, 151_936)):
        for case in CASES:
            if args.cases and case.name not in args.cases:
                continue
            result = compare(case, rows, vocab, args.pairs, vllm)
            bound = 4 * rows * vocab / (limits.read_gbps * 1e9)
            result["of_bound"] = bound / result["seconds"]["moestro"]
            results.append(result)
    after = measure_machine(args.threads)
    report = {
        "machine": {
            "num_threads": limits.num_threads,
            "level": limits.level,
            "read_gbps": limits.read_gbps,
            "read_gbps_after": after.read_gbps,
        },
        "versions": {"torch": torch.__version__},
        "vllm": vllm.versions if vllm else None,
        "pairs": args.pairs,
        "results": results,
    }
    if vllm:
        vllm.quit()
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    show(report)


if __name__ == "__main__":
    main()
