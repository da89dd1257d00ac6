"""StepBuilder: the Schedule while it is being planned."""

from moestro.core.page_moves import PageLoad
from moestro.core.request import Sequence
from moestro.core.step import NewSequence, Schedule, ScheduledSequence
from moestro.scheduler.lookahead import note_planned


class StepBuilder:
    """Collects runs in schedule order."""

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.runs: dict[int, ScheduledSequence] = {}
        self.num_tokens = 0
        self.admitted: dict[int, Sequence] = {}

    def add(self, seq: Sequence, run: ScheduledSequence) -> None:
        """Plan the next run of `seq`; its tokens count as computed from now on."""
        self.runs[seq.seq_id] = run
        self.num_tokens += run.num_tokens
        note_planned(seq, run)

    def add_admitted(self, seq: Sequence, run: ScheduledSequence) -> None:
        """Plan the first run of a sequence that has just been given its pages."""
        self.admitted[seq.seq_id] = seq
        self.add(seq, run)

    def build(self, released: tuple[int, ...], loads: tuple[PageLoad, ...] = ()) -> Schedule:
        """The finished Schedule."""
        new = tuple(_introduce(seq) for seq in self.admitted.values()) if self.admitted else ()
        return Schedule(self.step_id, tuple(self.runs.values()), new, released, loads)


def _introduce(seq: Sequence) -> NewSequence:
    request = seq.request
    return NewSequence(
        seq_id=seq.seq_id,
        token_ids=tuple(seq.token_ids) if seq.num_output_tokens else request.prompt_token_ids,
        num_prompt_tokens=seq.num_prompt_tokens,
        params=request.params,
        seed=request.seed,
        sample_index=seq.index,
        stop_token_ids=request.stop_token_ids,
        prompt_logprobs_from=_prompt_logprobs_from(seq),
    )


def _prompt_logprobs_from(seq: Sequence) -> int | None:
    """First prompt position without logprobs; position 0 never has any, so 0 and 1 mean all."""
    if not wants_prompt_logprobs(seq):
        return None
    delivered = seq.num_prompt_logprobs
    if delivered >= seq.num_prompt_tokens - 1 and delivered:
        return None
    return delivered + 1 if delivered else 0


def wants_prompt_logprobs(seq: Sequence) -> bool:
    """Whether `seq` scores its request's prompt: the first of the n does it for all."""
    return seq.index == 0 and seq.request.params.prompt_logprobs is not None
