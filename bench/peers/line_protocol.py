"""The benchmark workers' protocol: one JSON command a line in, one JSON answer a line out.

Commands: {"do": "prefill", "tokens": n}, {"do": "decode", "batch": b, "context": n, "steps": m},
{"do": "quit"}. Answers: {"seconds": s}, and what else a worker tells. The first line out says that
the worker is ready, and its versions.
"""

import json
import sys
from typing import Any, Protocol, TextIO


class Measurements(Protocol):
    """What a worker can be asked for."""

    def prefill(self, tokens: int) -> dict[str, Any]: ...

    def decode(self, batch: int, context: int, steps: int) -> dict[str, Any]: ...


def serve(worker: Measurements, versions: dict[str, str], answers: TextIO) -> None:
    """Answer the commands on stdin until quit or its end."""
    print(json.dumps({"ready": True, "versions": versions}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        what = command.pop("do")
        if what == "quit":
            break
        ask = worker.prefill if what == "prefill" else worker.decode
        print(json.dumps(ask(**command)), file=answers, flush=True)
