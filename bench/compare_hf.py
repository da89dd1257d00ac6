"""Moestro against HF transformers on one machine, in alternating pairs.

Both engines live in processes of their own for the whole run and answer in turn, so that slow and
fast phases of the machine hit both. Prints the median of each side, the median paired ratio with
its 95% interval (bootstrap over pairs) and the peak memory (RssAnon + RssShmem, without the mapped
weight files; VmHWM, with them); --json writes everything.
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from moestro.cli.bench.memory import PeakMemory, peak_rss_bytes

HERE = Path(__file__).parent
MEASURES: dict[str, tuple[dict[str, Any], int]] = {
    "prefill 512": ({"do": "prefill", "tokens": 512}, 512),
    "prefill 2048": ({"do": "prefill", "tokens": 2048}, 2048),
    "decode, batch 1": ({"do": "decode", "context": 64, "steps": 32}, 32),
}


class Peer:
    """A worker process and its line protocol.

    peak_memory_bytes: RssAnon + RssShmem while it loads and answers each measure once; the
    sampling ends before anything is timed.
    """

    def __init__(self, python: str, script: str, folder: str, threads: int) -> None:
        self.process = subprocess.Popen(
            # -P: this folder must not shadow the packages that transformers looks for (kernels).
            [python, "-P", str(HERE / script), folder, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with PeakMemory(self.process.pid) as memory:
            self.versions = self.read()["versions"]
            for command, _ in MEASURES.values():
                self.ask(command)
        self.peak_memory_bytes = memory.peak_bytes

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args} ended early")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.read()

    def memory(self) -> dict[str, int]:
        """Both peaks, in bytes."""
        return {
            "peak_memory_bytes": self.peak_memory_bytes,
            "peak_rss_bytes": peak_rss_bytes(self.process.pid),
        }

    def quit(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write('{"do": "quit"}\n')
        self.process.stdin.close()
        self.process.wait()


def interval(values: list[float], rounds: int = 2000) -> tuple[float, float]:
    """95% bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(rounds))
    return medians[int(rounds * 0.025)], medians[int(rounds * 0.975)]


def compare(ours: Peer, theirs: Peer, pairs: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (command, tokens) in MEASURES.items():
        for peer in (ours, theirs):
            peer.ask(command)
        rates: dict[str, list[float]] = {"moestro": [], "hf": []}
        for i in track(range(pairs), description=name, console=Console(stderr=True)):
            order = [("moestro", ours), ("hf", theirs)]
            for label, peer in order if i % 2 == 0 else order[::-1]:
                rates[label].append(tokens / peer.ask(command)["seconds"])
        ratios = [a / b for a, b in zip(rates["moestro"], rates["hf"], strict=True)]
        results[name] = {
            "moestro_tokens_per_s": statistics.median(rates["moestro"]),
            "hf_tokens_per_s": statistics.median(rates["hf"]),
            "ratio": statistics.median(ratios),
            "ratio_95": interval(ratios),
            "rates": rates,
        }
    return results


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def show(report: dict[str, Any]) -> None:
    table = Table(title=f"Moestro against HF transformers, {report['pairs']} alternating pairs")
    for column in ("", "moestro tok/s", "HF tok/s", "ratio (95%)"):
        table.add_column(column, justify="left" if not column else "right")
    for name, r in report["results"].items():
        low, high = r["ratio_95"]
        table.add_row(
            name,
            f"{r['moestro_tokens_per_s']:.1f}",
            f"{r['hf_tokens_per_s']:.1f}",
            f"{r['ratio']:.2f} ({low:.2f}-{high:.2f})",
        )
    for label, name in (("peak memory, GB", "peak_memory_bytes"), ("VmHWM, GB", "peak_rss_bytes")):
        ours, theirs = (report["memory"][k][name] for k in ("moestro", "hf"))
        table.add_row(label, f"{ours / 1e9:.2f}", f"{theirs / 1e9:.2f}", f"{ours / theirs:.2f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="checkpoint folder, see make_model.py")
    parser.add_argument("--peers-python", required=True, help="python that has transformers")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the report here")
    args = parser.parse_args()
    ours = Peer(sys.executable, "moestro_worker.py", args.folder, args.threads)
    theirs = Peer(args.peers_python, "hf_worker.py", args.folder, args.threads)
    results = compare(ours, theirs, args.pairs)
    report = {
        "machine": {"cpu": cpu_name(), "threads": args.threads},
        "versions": {"moestro": ours.versions, "hf": theirs.versions},
        "pairs": args.pairs,
        "results": results,
        "memory": {"moestro": ours.memory(), "hf": theirs.memory()},
    }
    ours.quit()
    theirs.quit()
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    show(report)


if __name__ == "__main__":
    main()
