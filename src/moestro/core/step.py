"""One engine step as data: the Schedule goes to a Runner, a StepOutput comes back.

The runner keeps per-sequence state (page table, token counts) from the first schedule that names
a sequence in `new_sequences` until one that names it in `released`. A preempted sequence is
released and later comes back as new, with all its tokens.

A step may be planned while the one before it still runs. Its decode runs then assume that every
draft of that step is accepted; the runner, which knows how many were, moves them back (see
ScheduledSequence.start). Runners execute steps in the order of step_id.
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
    (from NewSequence, sampled or drafted by it). new_pages are appended to its page table first.
    samples: True when the run ends at the last known token and its drafts, so that the next
    tokens are sampled. num_draft_tokens: the last so many positions are the first drafts that the
    sequence's last output proposed; the runner verifies those that it has, at most so many.
    num_next_drafts: how many drafts to propose for the step after, at most; the pages of the run
    hold their KV. allowed_tokens: grammar bit masks (see core.grammar), one for each of the
    1 + num_draft_tokens draws, or None.

    Of a run that samples, num_tokens says more than start: it ends with the last known token and
    its drafts, so it starts at (tokens known) + num_draft_tokens - num_tokens, which is below
    `start` by the drafts rejected since it was planned.
    """

    seq_id: int
    start: int
    num_tokens: int
    new_pages: tuple[int, ...]
    samples: bool
    allowed_tokens: tuple[bytes, ...] | None = None
    num_draft_tokens: int = 0
    num_next_drafts: int = 0


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

    token_ids: the sampled tokens: the accepted drafts and one more (none while its prompt is
    being computed). logprobs: one entry a sampled token when asked for. prompt_logprobs: entries
    for the prompt positions that this step scored, in order. num_draft_tokens: drafts verified.
    draft_token_ids: proposed for the next step. error: set when the sequence can't go on
    (non-finite logits).
    """

    seq_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_draft_tokens: int = 0
    draft_token_ids: tuple[int, ...] = ()
    error: str | None = None

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that the model would have said itself."""
        return max(0, len(self.token_ids) - 1)


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
    how long their copies took beside the step's own work. began_s, ended_s: when the device
    worked on it, on the runner's own clock; both 0 where a runner has none.
    """

    step_id: int
    sequences: tuple[SequenceOutput, ...]
    expert_tokens: ExpertTokens | None = None
    load_bytes: int = 0
    load_s: float = 0.0
    began_s: float = 0.0
    ended_s: float = 0.0

    @property
    def seconds(self) -> float:
        """How long the device worked on it."""
        return self.ended_s - self.began_s


class Runner(Protocol):
    """Executes schedules. The real one drives a model; tests and the simulator swap it."""

    def execute(self, schedule: Schedule) -> StepOutput: ...

    def close(self) -> None: ...
