"""Moestro as a benchmark worker: one JSON command a line in, one JSON answer a line out.

    python -m moestro.cli.bench.resident MODEL --threads 2 --engine '{"quantization": "w8a8"}'

Commands: {"do": "prefill", "tokens": n}, {"do": "decode", "batch": b, "context": n, "steps": m},
{"do": "quit"}. Answers: {"seconds": s}; with "token_ids": true in a decode command, also the ids.
Every peer's worker speaks this protocol.
"""

import argparse
import json
import random
import sys
import time
from typing import Any

import moestro
from moestro.config import EngineConfig
from moestro.core.messages import StepReport
from moestro.core.sampling_params import SamplingParams
from moestro.engine.built_engine import BuiltEngine
from moestro.errors import CapacityError, ConfigError, GenerationError, MoestroError

ENGINE = {
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 8192,
    "max_model_len": 8192,
    "max_num_seqs": 32,
    "skip_tokenizer_init": True,
    "weight_cache": "off",
}
"""A prompt is computed in one step, and nothing is found in a cache: every run is alike."""


class Resident:
    """A built engine, driven step by step, and the two measurements."""

    def __init__(self, built: BuiltEngine) -> None:
        self.built = built
        self._count = 0

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """What a command asks for. Raises GenerationError when a sequence fails, ConfigError or
        CapacityError when the batch can't run as one to its end."""
        if command["do"] == "prefill":
            return self.prefill(command["tokens"])
        tokens = bool(command.get("token_ids"))
        return self.decode(command["batch"], command["context"], command["steps"], tokens)

    def prefill(self, tokens: int) -> dict[str, Any]:
        """Seconds from a prompt to its first token."""
        self._start(1, tokens, 1)
        began = time.perf_counter()
        self._step_until(1)
        seconds = time.perf_counter() - began
        self._finish()
        return {"seconds": seconds}

    def decode(
        self, batch: int, context: int, steps: int, token_ids: bool = False
    ) -> dict[str, Any]:
        """Seconds of greedy steps of a batch after an untimed prefill."""
        self._start(batch, context, steps + 1)
        ids: dict[str, list[int]] = {}
        self._step_until(batch, ids)
        began = time.perf_counter()
        for _ in range(steps):
            self._step_until(batch, ids)
        seconds = time.perf_counter() - began
        self._finish()
        told: dict[str, Any] = {"seconds": seconds}
        return told | {"token_ids": list(ids.values())} if token_ids else told

    def _start(self, batch: int, tokens: int, max_tokens: int) -> None:
        self._check(batch, tokens + max_tokens)
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        for sequence in range(batch):
            self._count += 1
            draw = random.Random(tokens * 1000 + sequence)
            prompt = [draw.randrange(10, self.built.spec.vocab_size) for _ in range(tokens)]
            self.built.engine.add_request(
                self.built.processor.process(prompt, params, request_id=str(self._count))
            )

    def _check(self, batch: int, tokens: int) -> None:
        plan = self.built.plan
        if batch > plan.max_num_seqs:
            raise ConfigError(
                f"{batch} sequences would not run at once: max_num_seqs is {plan.max_num_seqs}. "
                "Make the batch smaller, or raise it with --engine."
            )
        if tokens > plan.max_model_len:
            raise ConfigError(
                f"prompt and output come to {tokens} tokens, and max_model_len is "
                f"{plan.max_model_len}. Make them shorter, or raise it with --engine."
            )
        pages = -(-tokens // plan.page_size) * batch
        if pages > plan.num_pages:
            raise CapacityError(
                f"{batch} sequences of {tokens} tokens need {pages} KV pages, and there are "
                f"{plan.num_pages}: make them fewer or shorter, or set kv_cache_memory_bytes to "
                f"{pages * plan.page_size * plan.kv_bytes_per_token} with --engine."
            )

    def _step_until(self, tokens: int, ids: dict[str, list[int]] | None = None) -> None:
        """Steps until so many tokens have come."""
        while tokens > 0:
            report = self.built.engine.step()
            for delta in report.deltas:
                tokens -= len(delta.token_ids)
                if ids is not None:
                    ids.setdefault(delta.request_id, []).extend(delta.token_ids)
            check(report)

    def _finish(self) -> None:
        while self.built.engine.has_work():
            check(self.built.engine.step())


def check(report: StepReport) -> None:
    """Raises GenerationError for a failed sequence: its step would measure something else."""
    for delta in report.deltas:
        if delta.error is not None:
            raise GenerationError(f"The batch can't be run to its end: {delta.error}")


def build(model: str, threads: int, engine: dict[str, Any]) -> BuiltEngine:
    """The engine that a worker drives; `engine` adds to ENGINE or overrides it."""
    from moestro.engine.build import build_engine

    return build_engine(
        EngineConfig.from_kwargs(**{**ENGINE, "model": model, "num_threads": threads, **engine})
    )


def main() -> None:
    """The worker's loop. A MoestroError ends it with one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engine", type=json.loads, default={}, help="EngineConfig as JSON")
    args = parser.parse_args()
    try:
        began = time.perf_counter()
        worker = Resident(build(args.model, args.threads, args.engine))
        told = {
            "ready": True,
            "versions": {"moestro": moestro.__version__},
            "load_s": time.perf_counter() - began,
            "plan": worker.built.plan.to_dict(),
        }
        print(json.dumps(told), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "quit":
                break
            print(json.dumps(worker.answer(command)), flush=True)
    except MoestroError as error:
        sys.exit(f"moestro worker: {error}")


if __name__ == "__main__":
    main()
