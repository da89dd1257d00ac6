"""Moestro as a benchmark worker, with the same line protocol as hf_worker.py."""

import argparse
import json
import random
import sys
import time
from typing import Any

import torch

import moestro
from moestro.config import EngineConfig
from moestro.core.messages import StepReport
from moestro.core.sampling_params import SamplingParams
from moestro.engine.build import build_engine


class Worker:
    """A built engine, driven step by step, and the two measurements."""

    def __init__(self, folder: str, threads: int) -> None:
        config = EngineConfig.from_kwargs(
            model=folder,
            num_threads=threads,
            enable_prefix_caching=False,
            max_num_batched_tokens=8192,
            max_model_len=8192,
        )
        self.built = build_engine(config)
        self.count = 0

    def start(self, tokens: int, max_tokens: int) -> None:
        self.count += 1
        draw = random.Random(tokens)
        prompt = [draw.randrange(10, self.built.spec.vocab_size) for _ in range(tokens)]
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.built.engine.add_request(
            self.built.processor.process(prompt, params, request_id=str(self.count))
        )

    def until_token(self) -> None:
        while not has_token(self.built.engine.step()):
            pass

    def prefill(self, tokens: int) -> dict[str, float]:
        self.start(tokens, 1)
        began = time.perf_counter()
        self.until_token()
        seconds = time.perf_counter() - began
        self.finish()
        return {"seconds": seconds}

    def decode(self, context: int, steps: int) -> dict[str, float]:
        """Greedy decode after an untimed prefill."""
        self.start(context, steps + 1)
        self.until_token()
        began = time.perf_counter()
        for _ in range(steps):
            self.until_token()
        seconds = time.perf_counter() - began
        self.finish()
        return {"seconds": seconds}

    def finish(self) -> None:
        while self.built.engine.has_work():
            self.built.engine.step()

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["do"] == "prefill":
            return self.prefill(command["tokens"])
        return self.decode(command["context"], command["steps"])


def has_token(report: StepReport) -> bool:
    return any(delta.token_ids for delta in report.deltas)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    worker = Worker(args.folder, args.threads)
    versions = {"moestro": moestro.__version__, "torch": torch.__version__}
    print(json.dumps({"ready": True, "versions": versions}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "quit":
            break
        print(json.dumps(worker.answer(command)), flush=True)


if __name__ == "__main__":
    main()
