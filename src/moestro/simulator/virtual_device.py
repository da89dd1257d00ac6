"""VirtualDevice: a Runner whose steps take a given time and say given tokens; two clocks for it.

Real: executed on the pipeline's own thread, it sleeps without the GIL, as a device computes. So
the engine's own work is measured beside a device of any speed. Virtual: VirtualSteps lets time
pass on a VirtualClock, so that what happens while a step runs is the same in every run.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from moestro.core.step import (
    NewSequence,
    Runner,
    Schedule,
    ScheduledSequence,
    SequenceOutput,
    StepOutput,
)
from moestro.simulator.clock import VirtualClock

StepSeconds = Callable[[Schedule], float]
"""How long the device works on a step."""

_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class _Said:
    """num_tokens: known ones, prompt and output; num_drafts: proposed behind them."""

    new: NewSequence
    num_tokens: int
    num_drafts: int = 0


@dataclass(slots=True)
class ScriptedSpeech:
    """A Runner that takes no time: tokens by (seed, sample index, position) alone.

    acceptance: chance that a draft is right if those before it are, drawn from the position too:
    so the tokens, and with them what is accepted, are the same however steps are planned.
    """

    vocab_size: int = 256
    acceptance: float = 0.0
    _said: dict[int, _Said] = field(default_factory=dict)

    def execute(self, schedule: Schedule) -> StepOutput:
        """See Runner."""
        for seq_id in schedule.released:
            del self._said[seq_id]
        for new in schedule.new_sequences:
            self._said[new.seq_id] = _Said(new, len(new.token_ids))
        return StepOutput(schedule.step_id, tuple(map(self._answer, schedule.sequences)))

    def close(self) -> None:
        """Forget everything."""
        self._said.clear()

    def token_id(self, new: NewSequence, position: int) -> int:
        """What `new` says at this position; never a token that would stop it."""
        token_id = self._draw(new, position) % self.vocab_size
        while token_id in new.stop_token_ids:
            token_id = (token_id + 1) % self.vocab_size
        return token_id

    def _answer(self, run: ScheduledSequence) -> SequenceOutput:
        said = self._said[run.seq_id]
        if not run.samples:
            return SequenceOutput(run.seq_id)
        num_drafts = min(run.num_draft_tokens, said.num_drafts)
        begin = said.num_tokens
        num_right = 0
        while num_right < num_drafts and self._is_right(said.new, begin + num_right):
            num_right += 1
        said.num_tokens += num_right + 1
        said.num_drafts = run.num_next_drafts
        return SequenceOutput(
            run.seq_id,
            tuple(self.token_id(said.new, begin + i) for i in range(num_right + 1)),
            num_draft_tokens=num_drafts,
            draft_token_ids=self._drafts(said),
        )

    def _drafts(self, said: _Said) -> tuple[int, ...]:
        drafts = []
        for position in range(said.num_tokens, said.num_tokens + said.num_drafts):
            token_id = self.token_id(said.new, position)
            if not self._is_right(said.new, position):
                token_id = (token_id + 1) % self.vocab_size
            drafts.append(token_id)
        return tuple(drafts)

    def _is_right(self, new: NewSequence, position: int) -> bool:
        return self._draw(new, ~position) % 4096 < 4096 * self.acceptance

    def _draw(self, new: NewSequence, salt: int) -> int:
        mixed = (new.seed * 31 + new.sample_index * 7 + salt + 1) * _MULTIPLIER & _MASK
        mixed = (mixed ^ mixed >> 29) * _MULTIPLIER & _MASK
        return mixed >> 32


class VirtualDevice:
    """Says what `speech` says, and takes as long as step_s tells, on the real clock.

    A step with nothing to compute takes no time.
    """

    def __init__(self, step_s: StepSeconds, speech: Runner | None = None) -> None:
        self._step_s = step_s
        self._speech = speech or ScriptedSpeech()

    def execute(self, schedule: Schedule) -> StepOutput:
        """See Runner; sleeps for what is left of the step's time."""
        began_s = time.monotonic()
        output = self._speech.execute(schedule)
        if schedule.sequences:
            left_s = began_s + self._step_s(schedule) - time.monotonic()
            if left_s > 0:
                time.sleep(left_s)
        return replace(output, began_s=began_s, ended_s=time.monotonic())

    def close(self) -> None:
        """See Runner."""
        self._speech.close()


class VirtualSteps:
    """A StepPipeline on a virtual clock: steps end one after the other, each after its time.

    To collect a step lets time pass until its end. What the host does meanwhile costs time only
    where the caller advances the clock.
    """

    def __init__(self, runner: Runner, clock: VirtualClock, step_s: StepSeconds) -> None:
        self.device_busy_s = 0.0
        self._runner = runner
        self._clock = clock
        self._step_s = step_s
        self._free_at_s = 0.0
        self._outputs: deque[StepOutput] = deque()

    def submit(self, schedule: Schedule) -> None:
        """See StepPipeline."""
        began_s = max(self._clock.now_s, self._free_at_s)
        seconds = self._step_s(schedule) if schedule.sequences else 0.0
        self._free_at_s = began_s + seconds
        self.device_busy_s += seconds
        output = self._runner.execute(schedule)
        self._outputs.append(replace(output, began_s=began_s, ended_s=self._free_at_s))

    def collect(self) -> StepOutput:
        """See StepPipeline."""
        output = self._outputs.popleft()
        self._clock.advance_to(output.ended_s)
        return output

    def close(self) -> None:
        """See StepPipeline."""
        self._outputs.clear()
