"""StepBuilder: the Schedule while it is being planned."""

from dataclasses import replace

from moestro.core.page_moves import PageLoad
from moestro.core.request import Sequence
from moestro.core.step import NewSequence, Schedule, ScheduledSequence


class StepBuilder:
    """Collects runs in schedule order."""

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.runs: dict[int, ScheduledSequence] = {}
        self.num_tokens = 0
        self.admitted: dict[int, Sequence] = {}

    def add(self, seq: Sequence, num_tokens: int, new_pages: tuple[int, ...]) -> None:
        """Plan the next `num_tokens` tokens of `seq`; they count as computed from now on."""
        start = seq.num_computed_tokens
        end = start + num_tokens
        samples = end == len(seq.token_ids)
        self.runs[seq.seq_id] = ScheduledSequence(seq.seq_id, start, num_tokens, new_pages, samples)
        seq.num_computed_tokens = end
        self.num_tokens += num_tokens

    def add_admitted(self, seq: Sequence, num_tokens: int) -> None:
        """Plan the first run of a sequence that has just been given its pages."""
        self.admitted[seq.seq_id] = seq
        self.add(seq, num_tokens, tuple(seq.pages))

    def constrain(self, run: ScheduledSequence, allowed_tokens: tuple[bytes, ...]) -> None:
        """Give a planned run its grammar masks, one a draw."""
        self.runs[run.seq_id] = replace(run, allowed_tokens=allowed_tokens)

    def remove(self, seq: Sequence) -> None:
        """Forget the run of a sequence that ends before it is executed."""
        self.num_tokens -= self.runs.pop(seq.seq_id).num_tokens
        self.admitted.pop(seq.seq_id, None)

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
