"""VirtualRunner: a Runner that computes nothing and says how long it would have taken."""

import math
from dataclasses import dataclass, fields

from moestro.core.step import NewSequence, Schedule, ScheduledSequence, SequenceOutput, StepOutput
from moestro.errors import ConfigError
from moestro.simulator.clock import VirtualClock
from moestro.simulator.workload import unique_token

_MAX_TOKENS_AT_ONCE = 64
"""Decode runs ahead of its pages by as much: a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What a step takes: prefill tokens by rate, decode by the step whatever its batch.

    chunk_tokens: of prompts in one real step; a longer chunk stands for several of them, between
    which the decodes go on. load_bytes_per_s: from host slots, overlapped with the computing.
    """

    prefill_tokens_per_s: float = 20_000.0
    decode_step_s: float = 0.03
    chunk_tokens: int = 2048
    page_bytes: int = 64 * 163_840
    load_bytes_per_s: float = 50e9

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (0 < value < math.inf):
                raise ConfigError(f"{field.name} must be positive, got {value}.")


@dataclass(slots=True)
class _State:
    """num_given: tokens it came with; what lies behind was sampled here, and paid for then."""

    num_given: int
    num_left: int
    token_id: int


class VirtualRunner:
    """Moves the clock by what a schedule costs; samples each request's own token, again and again.

    A step without prefill gives every sequence several tokens, as accepted drafts would: until the
    first of them ends, a page is full, or `horizon_s` is reached. Their KV counts as computed with
    them, although the scheduler accounts for it a step later.
    """

    def __init__(self, clock: VirtualClock, costs: StepCosts) -> None:
        self.horizon_s = math.inf
        """when something from outside happens next"""
        self.num_prefill_tokens = 0
        self._clock = clock
        self._costs = costs
        self._states: dict[int, _State] = {}

    def execute(self, schedule: Schedule) -> StepOutput:
        """See Runner."""
        for seq_id in schedule.released:
            del self._states[seq_id]
        for new in schedule.new_sequences:
            self._states[new.seq_id] = _introduced(new)
        num_prefill = 0
        decoding: list[_State] = []
        for run in schedule.sequences:
            state = self._states[run.seq_id]
            if run.start < state.num_given:
                num_prefill += min(run.start + run.num_tokens, state.num_given) - run.start
            elif run.samples:
                decoding.append(state)
        num_steps = self._num_steps(num_prefill, decoding)
        load_bytes = self._costs.page_bytes * sum(len(load.pages) for load in schedule.loads)
        load_s = load_bytes / self._costs.load_bytes_per_s
        seconds = num_prefill / self._costs.prefill_tokens_per_s
        if decoding:
            seconds += num_steps * self._costs.decode_step_s
        began_s = self._clock.now_s
        self._clock.advance(max(seconds, load_s))
        self.num_prefill_tokens += num_prefill
        outputs = tuple(self._output(run, num_steps) for run in schedule.sequences)
        return StepOutput(
            schedule.step_id,
            outputs,
            load_bytes=load_bytes,
            load_s=load_s,
            began_s=began_s,
            ended_s=self._clock.now_s,
        )

    def close(self) -> None:
        """Forget everything."""
        self._states.clear()

    def _num_steps(self, num_prefill: int, decoding: list[_State]) -> int:
        """Real decode steps that this one stands for."""
        if num_prefill:
            return min(_MAX_TOKENS_AT_ONCE, -(-num_prefill // self._costs.chunk_tokens))
        if not decoding:
            return 1
        soonest = min(state.num_left for state in decoding)
        left_s = self.horizon_s - self._clock.now_s
        until = _MAX_TOKENS_AT_ONCE
        if left_s < until * self._costs.decode_step_s:
            until = max(1, math.ceil(left_s / self._costs.decode_step_s))
        return min(soonest, until)

    def _output(self, run: ScheduledSequence, num_steps: int) -> SequenceOutput:
        if not run.samples:
            return SequenceOutput(run.seq_id)
        state = self._states[run.seq_id]
        num_tokens = 1 if run.start < state.num_given else min(num_steps, state.num_left)
        state.num_left = max(1, state.num_left - num_tokens)
        return SequenceOutput(run.seq_id, (state.token_id,) * num_tokens)


def _introduced(new: NewSequence) -> _State:
    num_output = len(new.token_ids) - new.num_prompt_tokens
    most = new.params.max_tokens or 1
    return _State(len(new.token_ids), max(1, most - num_output), unique_token(new.seed))
