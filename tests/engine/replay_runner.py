"""A Runner that says prepared texts, so that tests read like conversations."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from moestro.core.step import (
    NewSequence,
    Schedule,
    ScheduledSequence,
    SequenceOutput,
    StepOutput,
    TokenLogprobs,
)


@dataclass
class ReplayRunner:
    """Answers with replies[last prompt token], one id a step (burst: that many).

    After a reply's end it repeats token 0. broken_at: the step whose execute raises. poison: a
    last prompt token whose sequences fail.
    """

    replies: Mapping[int, bytes | list[int]]
    burst: int = 1
    broken_at: int | None = None
    poison: int | None = None
    closed: bool = False
    num_steps: int = 0
    _known: dict[int, tuple[NewSequence, int]] = field(default_factory=dict)

    def execute(self, schedule: Schedule) -> StepOutput:
        if self.num_steps == self.broken_at:
            raise RuntimeError("the runner broke")
        self.num_steps += 1
        for seq_id in schedule.released:
            del self._known[seq_id]
        for new in schedule.new_sequences:
            self._known[new.seq_id] = new, len(new.token_ids) - new.num_prompt_tokens
        outputs = tuple(self._answer(run) for run in schedule.sequences)
        return StepOutput(schedule.step_id, outputs)

    def close(self) -> None:
        self.closed = True

    def _answer(self, run: ScheduledSequence) -> SequenceOutput:
        new, said = self._known[run.seq_id]
        prompt = new.token_ids[: new.num_prompt_tokens]
        if prompt[-1] == self.poison:
            return SequenceOutput(run.seq_id, error="non-finite logits")
        scored: tuple[TokenLogprobs, ...] = ()
        if new.prompt_logprobs_from is not None:
            end = min(run.start + run.num_tokens, len(prompt) - 1)
            scored = tuple(_score(prompt[i + 1]) for i in range(run.start, end))
        if not run.samples:
            return SequenceOutput(run.seq_id, prompt_logprobs=scored)
        reply = [*self.replies[prompt[-1]], *[0] * (said + self.burst)]
        ids = tuple(reply[said : said + self.burst])
        self._known[run.seq_id] = new, said + len(ids)
        logprobs = tuple(map(_score, ids)) if new.params.logprobs is not None else ()
        return SequenceOutput(run.seq_id, ids, logprobs, scored)


def _score(token_id: int) -> TokenLogprobs:
    """The token itself and two alternatives, one of them the token again."""
    best = (token_id + 1) % 256
    return TokenLogprobs((token_id, best, token_id), (-1.5, -0.5, -1.5), (2, 1, 2))
