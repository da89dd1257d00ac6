"""Drafting: shows a Drafter each computed step, and gives the sequences what it proposes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from moestro.core.step import Schedule, SequenceOutput
from moestro.ops.attention import AttentionMetadata
from moestro.runner.inputs import InputBuilder
from moestro.runner.sequence_state import SequenceState
from moestro.speculative.drafter import ComputedStep, DraftedSequence, Drafter


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step's rows, sequence after sequence; valid until the next step is computed.

    hidden_states: [T, N] after the final norm; positions: [T] int64. ends: one past each
    sequence's last row. draws: how many of its last rows drew; 0 where the run did not sample.
    row_token_ids: what those drew, of all sequences in order.
    """

    hidden_states: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    ends: Sequence[int]
    draws: Sequence[int]
    row_token_ids: Sequence[int]


class Drafting:
    """One drafter and how it is asked."""

    def __init__(self, drafter: Drafter, inputs: InputBuilder) -> None:
        self._drafter = drafter
        self._inputs = inputs
        self._sees_all = drafter.reads_hidden_states

    def release(self, seq_ids: Sequence[int]) -> None:
        """Sequences that the runner forgets."""
        self._drafter.release(seq_ids)

    def warm_up(self, sizes: Sequence[int]) -> None:
        """Numbers of sequences that will draft together."""
        self._drafter.warm_up(sizes)

    def close(self) -> None:
        self._drafter.close()

    def asked_by(self, schedule: Schedule) -> bool:
        """Whether the drafter must see this step."""
        return self._sees_all or any(item.num_next_drafts for item in schedule.sequences)

    def propose(
        self,
        schedule: Schedule,
        states: Sequence[SequenceState],
        outputs: list[SequenceOutput],
        rows: StepRows,
    ) -> None:
        """Follow a step whose tokens the states know already; outputs get the proposals."""
        places, drafted = [], []
        for i, (item, state) in enumerate(zip(schedule.sequences, states, strict=True)):
            said = len(outputs[i].token_ids)
            if not said:
                continue
            places.append(i)
            drafted.append(
                DraftedSequence(
                    seq_id=state.seq_id,
                    token_ids=state.token_ids,
                    row=rows.ends[i] - rows.draws[i] + said - 1,
                    page_table=self._inputs.page_table(state),
                    num_wanted=item.num_next_drafts,
                )
            )
        step = ComputedStep(
            hidden_states=rows.hidden_states,
            next_token_ids=_next_token_ids(states, rows) if self._sees_all else _NO_TOKENS,
            positions=rows.positions,
            attention=rows.attention,
            sequences=drafted,
        )
        proposals = self._drafter.propose(step)
        for i, each, drafts in zip(places, drafted, proposals, strict=True):
            if len(drafts) > each.num_wanted:
                raise ValueError(
                    f"{len(drafts)} drafts for sequence {each.seq_id}, which wants "
                    f"{each.num_wanted}."
                )
            if drafts:
                states[i].propose(drafts)
                outputs[i] = replace(outputs[i], draft_token_ids=drafts)


_NO_TOKENS = torch.zeros(0, dtype=torch.int64)


def _next_token_ids(states: Sequence[SequenceState], rows: StepRows) -> torch.Tensor:
    """[T] int64, see ComputedStep; 0 where a row drew nothing."""
    drawn = np.array(rows.row_token_ids, np.int64).clip(0)
    if len(drawn) == rows.ends[-1]:
        return torch.from_numpy(drawn)
    found = np.zeros(rows.ends[-1], np.int64)
    positions = rows.positions.numpy()
    begin = at = 0
    for state, end, count in zip(states, rows.ends, rows.draws, strict=True):
        known = state.tokens_at(int(positions[begin]) + 1, end - count - begin)
        found[begin : begin + len(known)] = known
        found[end - count : end] = drawn[at : at + count]
        begin, at = end, at + count
    return torch.from_numpy(found)
