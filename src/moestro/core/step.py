"""One engine step as data: the Schedule goes to a Runner, a StepOutput comes back.

The runner keeps per-sequence state (page table, token counts) from the first schedule that names
a sequence in `new_sequences` until one that names it in `released`. A preempted sequence is
released and later comes back as new, with all its tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from moestro.core.page_moves import PageLoad
from moestro.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewSequence:
    """What the runner must remember of a sequence.

    token_ids: every token known so far (prompt, and output when it was preempted).
    sample_index: position within the request's n, part of the noise key.
    stop_token_ids are suppressed while fewer than params.min_tokens have been generated.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    sample_index: int
    stop_token_ids: frozenset[int]
    prompt_logprobs_from: int | None = None
    """First prompt position whose logprobs are still wanted; None when none are."""


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A run of tokens of one sequence to compute in this step.

    Positions [start, start + num_tokens) are computed; their token ids are known to the runner
    (from NewSequence, or sampled by it). new_pages are appended to its page table first.
    samples: True when the run ends at the last known token, so that the next one is sampled.
    allowed_tokens: grammar bit mask (see core.grammar), or None.
    """

    seq_id: int
    start: int
    num_tokens: int
    new_pages: tuple[int, ...]
    samples: bool
    allowed_tokens: bytes | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """The work of one step, in a deterministic order. released comes before new_sequences.

    loads: pages whose bytes come from the host tier before attention reads them.
    """

    step_id: int
    sequences: tuple[ScheduledSequence, ...]
    new_sequences: tuple[NewSequence, ...] = ()
    released: tuple[int, ...] = ()
    loads: tuple[PageLoad, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(s.num_tokens for s in self.sequences)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position, before temperature and penalties.

    token_ids[0] is the token itself (sampled, or the prompt's own); the rest are the most likely
    ones, best first. ranks are 1-based in the whole vocabulary.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What a step gave one scheduled sequence.

    token_ids: the sampled tokens (none while its prompt is being computed). logprobs: one entry
    a sampled token when asked for. prompt_logprobs: entries for the prompt positions that this
    step scored, in order. error: set when the sequence can't go on (non-finite logits).
    """

    seq_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertTokens:
    """How many tokens chose each expert since the last one of these.

    layers: the model's layer that each row is of. counts: a row of num_experts int64 a layer, in
    this machine's byte order, so that making one costs a copy and no more.
    """

    layers: tuple[int, ...]
    num_experts: int
    counts: bytes

    def rows(self) -> Iterator[tuple[int, Sequence[int]]]:
        """(layer, tokens of each expert)."""
        flat = memoryview(self.counts).cast("q")
        for row, layer in enumerate(self.layers):
            yield layer, flat[row * self.num_experts : (row + 1) * self.num_experts].tolist()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results in the order of Schedule.sequences.

    expert_tokens: told now and then, not every step. load_bytes, load_s: of Schedule.loads, and
    how long their copies took beside the step's own work.
    """

    step_id: int
    sequences: tuple[SequenceOutput, ...]
    expert_tokens: ExpertTokens | None = None
    load_bytes: int = 0
    load_s: float = 0.0


class Runner(Protocol):
    """Executes schedules. The real one drives a model; tests and the simulator swap it."""

    def execute(self, schedule: Schedule) -> StepOutput: ...

    def close(self) -> None: ...
