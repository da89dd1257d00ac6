"""Host cost of sampling a step: the runner's Sampler on a vocabulary too small to cost anything.

Microseconds of this process's main thread, median over steps; one thread, so that no time is spent
waiting for others.
"""

import argparse
import statistics
import time

import torch

from moestro.backends.cpu import library
from moestro.core.sampling_params import SamplingParams
from moestro.core.step import NewSequence
from moestro.runner.sampler import Sampler
from moestro.runner.sequence_state import SequenceState

CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top-k, top-p": SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
    "penalties": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.2),
    "bias": SamplingParams(logit_bias=((3, 1.0), (9, -2.0))),
    "logprobs": SamplingParams(logprobs=5),
}


def sequences(params: SamplingParams, count: int, vocab: int) -> list[SequenceState]:
    prompt = tuple(i % vocab for i in range(50))
    return [
        SequenceState(NewSequence(i, prompt, 50, params, i, 0, frozenset({1})), i)
        for i in range(count)
    ]


@torch.inference_mode()
def host_us(params: SamplingParams, rows: int, vocab: int, steps: int) -> tuple[float, float]:
    """Of sample(), and of that with the tokens appended."""
    sampler, states = Sampler(), sequences(params, rows, vocab)
    logits = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(1))
    drawn, whole = [], []
    for _ in range(steps):
        begin = time.thread_time_ns()
        outputs = sampler.sample(logits, states, [None] * rows)
        middle = time.thread_time_ns()
        for state, output in zip(states, outputs, strict=True):
            for token_id in output.token_ids:
                state.append(token_id)
        whole.append(time.thread_time_ns() - begin)
        drawn.append(middle - begin)
    return statistics.median(drawn) / 1e3, statistics.median(whole) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    library.native().set_num_threads(1)
    for name, params in CASES.items():
        drawn, whole = host_us(params, args.rows, args.vocab, args.steps)
        print(f"{name:14s} {drawn:7.1f} us, with the tokens appended {whole:7.1f} us")


if __name__ == "__main__":
    main()
