"""ik_llama.cpp as a benchmark worker, with line_protocol.py's commands.

Calls its libllama through the ctypes binding of the wheel; the token of a step is chosen by numpy,
whose argmax over the logits costs a few microseconds. Batches are not asked of it: that version
aborts in a decode of several sequences.
"""

import argparse
import ctypes
import os
import random
import time
from typing import Any

import numpy as np
from line_protocol import serve

LONGEST = 2304
"""Tokens of a sequence's context, and of a batch."""


class Worker:
    """A loaded GGUF file and the two measurements."""

    def __init__(self, path: str, threads: int) -> None:
        from ik_llama_cpp import _ctypes_api as binding

        self.binding, self.threads = binding, threads
        binding.llama_backend_init()
        params = binding.llama_model_default_params()
        self.model = binding.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise SystemExit(f"ik_worker: can't load {path}")
        vocab = binding.llama_model_get_vocab(self.model)
        self.vocab = binding.llama_vocab_n_tokens(vocab)
        self.context: Any = None
        self.sequences = 0

    def context_for(self, sequences: int) -> None:
        """An empty context of so many sequences."""
        if sequences != self.sequences:
            if self.context:
                self.binding.llama_free(self.context)
            params = self.binding.llama_context_default_params()
            params.n_ctx = LONGEST if sequences == 1 else 256 * sequences
            params.n_batch, params.n_seq_max = LONGEST, sequences
            params.n_threads = params.n_threads_batch = self.threads
            params.flash_attn = True
            self.context = self.binding.llama_init_from_model(self.model, params)
            self.sequences = sequences
        self.binding.llama_kv_cache_clear(self.context)

    def run(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Rows of (token, position, sequence, wanted); the best token of the wanted ones."""
        batch = self.binding.llama_batch_init(len(rows), 0, 1)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        batch.n_tokens = len(rows)
        if self.binding.llama_decode(self.context, batch):
            raise SystemExit("ik_worker: llama_decode failed")
        best = [self.best(i) for i, row in enumerate(rows) if row[3]]
        self.binding.llama_batch_free(batch)
        return best

    def best(self, row: int) -> int:
        logits = self.binding.llama_get_logits_ith(self.context, row)
        pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(pointer, (self.vocab,)).argmax())

    def feed(self, tokens: int, sequence: int) -> int:
        draw = random.Random(tokens * 1000 + sequence)
        ids = [draw.randrange(10, self.vocab) for _ in range(tokens)]
        return self.run([(t, i, sequence, i + 1 == tokens) for i, t in enumerate(ids)])[0]

    def prefill(self, tokens: int) -> dict[str, float]:
        self.context_for(1)
        began = time.perf_counter()
        self.feed(tokens, 0)
        return {"seconds": time.perf_counter() - began}

    def decode(self, batch: int, context: int, steps: int) -> dict[str, float]:
        """Greedy decode after an untimed prefill."""
        self.context_for(batch)
        last = [self.feed(context, sequence) for sequence in range(batch)]
        began = time.perf_counter()
        for step in range(steps):
            last = self.run([(t, context + step, s, True) for s, t in enumerate(last)])
        return {"seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints must not mix with the answers
    worker = Worker(args.model, args.threads)
    serve(worker, {}, answers)


if __name__ == "__main__":
    main()
