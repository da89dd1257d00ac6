"""Lookahead: what a sequence will be once its steps in flight are done, every draft accepted.

A step may be planned before the tokens of earlier ones are known. Until then the sequence counts
as long as it can become; what was rejected is taken off when a step's output comes, and the
runner moves the runs planned meanwhile by as much (see core.step).
"""

from moestro.core.request import Sequence, SequenceStatus
from moestro.core.step import ScheduledSequence, SequenceOutput


def future_len(seq: Sequence) -> int:
    """Its length if every draft in flight is accepted."""
    return len(seq.token_ids) + seq.num_pending_tokens


def note_planned(seq: Sequence, run: ScheduledSequence) -> None:
    """`run`, which begins at seq.num_computed_tokens, is in flight: it counts as computed."""
    seq.num_runs_in_flight += 1
    seq.num_computed_tokens += run.num_tokens
    if run.samples:
        seq.num_pending_tokens += 1 + run.num_draft_tokens
        seq.num_next_drafts = run.num_next_drafts


def note_output(seq: Sequence, run: ScheduledSequence, output: SequenceOutput) -> None:
    """The tokens of `run` are known: `output` in place of what was assumed."""
    seq.num_runs_in_flight -= 1
    is_running = seq.status is SequenceStatus.RUNNING  # else it holds nothing that was computed
    if run.samples:
        assumed = 1 + run.num_draft_tokens
        seq.num_pending_tokens -= assumed
        if is_running:
            seq.num_computed_tokens -= max(0, assumed - len(output.token_ids))
    if is_running and not seq.num_runs_in_flight:
        seq.draft_token_ids = output.draft_token_ids[: seq.num_next_drafts]
        seq.num_next_drafts = len(seq.draft_token_ids)


def num_committed(seq: Sequence, run: ScheduledSequence) -> int:
    """Tokens that `run`, whose output is in seq.token_ids, leaves computed and final.

    The last token is sampled and has no KV yet; rejected drafts lie behind it.
    """
    return min(run.start + run.num_tokens, len(seq.token_ids) - 1)


def drop_drafts(seq: Sequence) -> None:
    """The runner forgets the sequence, and with it what it drafted."""
    seq.num_next_drafts = 0
    seq.draft_token_ids = ()
