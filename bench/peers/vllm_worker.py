"""vLLM's CPU build as a benchmark worker, with line_protocol.py's commands.

The engine runs inside this process and is driven step by step, as Moestro's worker drives its
own: prefix cache off, a prompt computed in one step. --eager turns torch.compile off.
"""

import argparse
import os
import random
import time

from line_protocol import serve


def prepare(threads: int) -> None:
    """The environment that vLLM reads while it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}" if threads > 1 else "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"


class Worker:
    """An engine in this process, and the two measurements."""

    def __init__(self, folder: str, eager: bool) -> None:
        from vllm import LLM

        self.llm = LLM(
            folder,
            dtype="bfloat16",
            enforce_eager=eager,
            enable_prefix_caching=False,
            max_model_len=4096,
            max_num_batched_tokens=8192,
            max_num_seqs=32,
            disable_log_stats=True,
        )
        self.vocab = self.llm.llm_engine.model_config.get_vocab_size()
        self.count = 0

    def start(self, batch: int, tokens: int, max_tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        for sequence in range(batch):
            self.count += 1
            draw = random.Random(tokens * 1000 + sequence)
            ids = [draw.randrange(10, self.vocab) for _ in range(tokens)]
            self.llm.llm_engine.add_request(str(self.count), {"prompt_token_ids": ids}, params)

    def step(self, lengths: dict[str, int]) -> None:
        """One engine step; lengths: tokens generated so far by request."""
        for output in self.llm.llm_engine.step():
            lengths[output.request_id] = len(output.outputs[0].token_ids)

    def prefill(self, tokens: int) -> dict[str, float]:
        self.start(1, tokens, 1)
        lengths: dict[str, int] = {}
        began = time.perf_counter()
        while self.llm.llm_engine.has_unfinished_requests():
            self.step(lengths)
        return {"seconds": time.perf_counter() - began}

    def decode(self, batch: int, context: int, steps: int) -> dict[str, float]:
        """Greedy decode after an untimed prefill; tells how many tokens the time holds."""
        self.start(batch, context, steps + 1)
        lengths: dict[str, int] = {}
        while len(lengths) < batch:
            self.step(lengths)
        before = sum(lengths.values())
        began = time.perf_counter()
        while self.llm.llm_engine.has_unfinished_requests():
            self.step(lengths)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": sum(lengths.values()) - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    prepare(args.threads)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints must not mix with the answers
    import torch
    import vllm

    worker = Worker(args.folder, args.eager)
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    serve(worker, versions, answers)


if __name__ == "__main__":
    main()
