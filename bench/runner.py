"""Host cost of the runner: microseconds per decode step around a model that computes nothing.

    python bench/runner.py [--steps 300] [--vocab 120832] [--context 1000]

`inputs` is Schedule to ForwardBatch; `step` is all of ModelRunner.execute over fixed logits, by
sampling options. Medians; one thread.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

import moestro.backends.cpu  # noqa: F401 -- registers the bodies
from moestro import ops
from moestro.core.model_spec import ModelSpec, RopeSpec
from moestro.core.sampling_params import SamplingParams
from moestro.core.step import NewSequence, Schedule, ScheduledSequence
from moestro.runner.inputs import InputBuilder
from moestro.runner.kv_pool import KVPool
from moestro.runner.model_runner import ModelRunner

OPTIONS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.9),
    "top_k 20, top_p 0.8": SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
    "top_p 0.95": SamplingParams(temperature=0.6, top_p=0.95),
    "min_p 0.05": SamplingParams(temperature=1.0, min_p=0.05),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.5),
    "logprobs 5": SamplingParams(temperature=0.0, logprobs=5),
}
SPEC = ModelSpec(
    model_type="null",
    vocab_size=0,
    hidden_size=1,
    intermediate_size=1,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=1,
    moe=None,
    moe_layers=(False,),
    num_mtp_layers=0,
    rms_norm_eps=1e-6,
    rope=RopeSpec(theta=1e4),
    max_position_embeddings=1 << 20,
    tie_word_embeddings=True,
    dtype="float32",
    eos_token_ids=(),
)


class NullModel(nn.Module):
    """Hands out the same logits, of a spread as language models have it, for every row."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.spec = replace(SPEC, vocab_size=vocab_size)
        rank = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0)) + 1.0
        self.row = 20 - 1.5 * rank.log()

    def forward(
        self,
        input_ids: torch.Tensor,
        _positions: torch.Tensor,
        _kv_pages: Sequence[ops.KVPages],
        _attn: ops.AttentionMetadata,
    ) -> torch.Tensor:
        return input_ids[:, None]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.row.repeat(len(hidden_states), 1)


def decode_schedule(step: int, batch: int, context: int, page_size: int) -> Schedule:
    """One token of each sequence, a new page where its turn has come."""
    position = context + step
    sequences = []
    for i in range(batch):
        page = (i * 4096 + position // page_size,) if position % page_size == 0 else ()
        sequences.append(ScheduledSequence(i, position, 1, page, True))
    return Schedule(step, tuple(sequences))


def opening(batch: int, context: int, params: SamplingParams) -> Schedule:
    """Makes the sequences known, all but the last token computed, without running the model."""
    new = tuple(
        NewSequence(i, tuple(range(context)), context, params, i, 0, frozenset())
        for i in range(batch)
    )
    return Schedule(0, (), new)


def inputs_us(batch: int, steps: int, context: int) -> float:
    """Median of InputBuilder.build."""
    page_size = 64
    builder = InputBuilder(batch, context + steps + page_size, page_size)
    builder.admit(opening(batch, context, OPTIONS["greedy"]))
    times = []
    for step in range(-1, steps):
        schedule = decode_schedule(step, batch, context, page_size)
        states = builder.states(schedule)
        if step == -1:
            pages = -(-context // page_size)
            schedule = Schedule(
                0,
                tuple(
                    ScheduledSequence(i, context - 1, 1, tuple(range(pages)), True)
                    for i in range(batch)
                ),
            )
        begin = time.perf_counter()
        builder.build(schedule, states)
        times.append(time.perf_counter() - begin)
        for state in states:
            state.append(1)
    return statistics.median(times) * 1e6


def step_us(batch: int, steps: int, context: int, vocab: int, params: SamplingParams) -> float:
    """Median of ModelRunner.execute, the copies of the fixed logits not counted."""
    page_size = 64
    model = NullModel(vocab)
    pool = KVPool(model.spec, 1, page_size, torch.float32)
    runner = ModelRunner(
        model,  # type: ignore[arg-type]
        pool,
        max_num_seqs=batch,
        max_model_len=context + steps + page_size,
        logits_block_bytes=1 << 30,
    )
    runner.execute(opening(batch, context, params))
    times = []
    pages = tuple(range(-(-context // page_size)))
    for step in range(-1, steps):
        schedule = decode_schedule(step, batch, context, page_size)
        if step == -1:
            first = (ScheduledSequence(i, context - 1, 1, pages, True) for i in range(batch))
            schedule = Schedule(0, tuple(first))
        begin = time.perf_counter()
        runner.execute(schedule)
        times.append(time.perf_counter() - begin)
    copies = []
    hidden = torch.zeros(batch, 1)
    for _ in range(20):
        begin = time.perf_counter()
        model.compute_logits(hidden)
        copies.append(time.perf_counter() - begin)
    runner.close()
    return (statistics.median(times) - statistics.median(copies)) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--vocab", type=int, default=120832)
    parser.add_argument("--context", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    out = sys.stdout
    out.write(f"context {args.context}, V {args.vocab}, microseconds per step\n")
    out.write(f"{'':24}{'batch 1':>12}{'batch 16':>12}{'batch 128':>12}\n")
    batches = (1, 16, 128)
    row = [inputs_us(batch, args.steps, args.context) for batch in batches]
    out.write(f"{'inputs':24}" + "".join(f"{us:12.0f}" for us in row) + "\n")
    for name, params in OPTIONS.items():
        row = [
            step_us(batch, max(5, args.steps // batch), args.context, args.vocab, params)
            for batch in batches
        ]
        out.write(f"{'step, ' + name:24}" + "".join(f"{us:12.0f}" for us in row) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
