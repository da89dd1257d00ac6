"""From a Schedule and what the runner remembers to a ForwardBatch."""

from collections.abc import Sequence

import numpy as np
import torch

from moestro.core.step import Schedule, ScheduledSequence
from moestro.ops.attention import AttentionMetadata
from moestro.runner.forward_batch import ForwardBatch, ScoredRun
from moestro.runner.page_table import PageTable
from moestro.runner.sequence_state import SequenceState
from moestro.runner.step_inputs import StepInputs


class InputBuilder:
    """Owns the sequence states and the page table; builds one batch a step.

    A decode step costs a few array operations over the batch and one small loop, no more.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, page_size: int) -> None:
        self._table = PageTable(max_num_seqs, max_model_len, page_size)
        self._states: dict[int, SequenceState] = {}

    @property
    def page_table_width(self) -> int:
        """Most pages that a sequence may have."""
        return self._table.pages.shape[1]

    def admit(self, schedule: Schedule) -> None:
        """Forget what the schedule releases, then learn its new sequences."""
        for seq_id in schedule.released:
            self._table.give_row(self._states.pop(seq_id).row)
        for new in schedule.new_sequences:
            if new.seq_id in self._states:
                raise ValueError(f"sequence {new.seq_id} is new but was never released.")
            self._states[new.seq_id] = SequenceState(new, self._table.take_row())

    def states(self, schedule: Schedule) -> list[SequenceState]:
        """The state of each scheduled sequence, in order."""
        return [self._states[item.seq_id] for item in schedule.sequences]

    def fill_decode(
        self, schedule: Schedule, states: Sequence[SequenceState], inputs: StepInputs
    ) -> int:
        """Write a step in which every sequence computes and samples one token into `inputs`.

        Returns the longest length, or 0, and then nothing has happened, for another kind of step.
        Raises ValueError as build does.
        """
        for item, state in zip(schedule.sequences, states, strict=True):
            if item.num_tokens != 1 or not item.samples or _is_scored(item, state):
                return 0
        table, size, count = self._table, self._table.page_size, len(states)
        ids, positions, slots, rows = [], [], [], []
        for item, state in zip(schedule.sequences, states, strict=True):
            start, row = item.start, state.row
            if item.new_pages:
                table.append(row, item.new_pages)
            if start + 1 != state.num_tokens or start >= table.capacity(row):
                self._check(item, state)
            ids.append(state.token_at(start))
            positions.append(start)
            page, offset = divmod(start, size)
            slots.append(table.pages.item(row, page) * size + offset)
            rows.append(row)
        inputs.ids[:count] = ids
        inputs.positions[:count] = positions
        inputs.slots[:count] = slots
        np.add(inputs.positions[:count], 1, out=inputs.seq_lens[:count], casting="unsafe")
        longest = max(positions) + 1
        width = -(-longest // size)
        if inputs.table_of != (table.version, width, rows):
            table.pages[:, :width].take(rows, axis=0, out=inputs.table[:count, :width])
            inputs.table_of = (table.version, width, rows)
            inputs.starts[: count + 1] = range(count + 1)
        return longest

    def build(self, schedule: Schedule, states: Sequence[SequenceState]) -> ForwardBatch:
        """The batch of a non-empty schedule. Raises ValueError when the two disagree."""
        items = schedule.sequences
        for item, state in zip(items, states, strict=True):
            if item.new_pages:
                self._table.append(state.row, item.new_pages)
            self._check(item, state)
        starts = np.array([item.start for item in items], np.int64)
        lens = np.array([item.num_tokens for item in items], np.int64)
        ends = np.cumsum(lens)
        if int(ends[-1]) == len(items):
            positions = starts
            ids = [s.token_at(i.start) for i, s in zip(items, states, strict=True)]
            input_ids = np.array(ids, np.int64)
        else:
            positions = np.repeat(starts - ends + lens, lens) + np.arange(ends[-1])
            input_ids = np.concatenate(
                [
                    s.token_ids[i.start : i.start + i.num_tokens]
                    for i, s in zip(items, states, strict=True)
                ]
            )
        scored = _scored_runs(items, states)
        return ForwardBatch(
            input_ids=torch.from_numpy(input_ids),
            positions=torch.from_numpy(positions),
            attention=self._attention(states, starts, lens, positions),
            logits_indices=torch.from_numpy(_logits_indices(items, ends, scored)),
            sampled=tuple(i for i, item in enumerate(items) if item.samples),
            scored=scored,
        )

    def _attention(
        self,
        states: Sequence[SequenceState],
        starts: np.ndarray,
        lens: np.ndarray,
        positions: np.ndarray,
    ) -> AttentionMetadata:
        size = self._table.page_size
        rows = np.array([state.row for state in states], np.int64)
        seq_lens = starts + lens
        max_seq_len = int(seq_lens.max())
        page_table = self._table.pages[:, : -(-max_seq_len // size)].take(rows, axis=0)
        token_rows = rows if len(positions) == len(rows) else np.repeat(rows, lens)
        page, offset = np.divmod(positions, size)
        slots = self._table.pages[token_rows, page] * np.int64(size) + offset
        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lens, out=query_start_loc[1:])
        return AttentionMetadata(
            query_start_loc=torch.from_numpy(query_start_loc),
            seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
            page_table=torch.from_numpy(page_table),
            slot_mapping=torch.from_numpy(slots),
            max_query_len=int(lens.max()),
            max_seq_len=max_seq_len,
        )

    def _check(self, item: ScheduledSequence, state: SequenceState) -> None:
        end = item.start + item.num_tokens
        known = state.num_tokens
        if item.num_tokens < 1 or end > known or (item.samples and end != known):
            raise ValueError(
                f"sequence {item.seq_id} is scheduled for positions [{item.start}, {end}) with "
                f"samples={item.samples}, but {known} of its tokens are known."
            )
        if end > self._table.capacity(state.row):
            raise ValueError(
                f"sequence {item.seq_id} is scheduled up to position {end}, but its pages hold "
                f"{self._table.capacity(state.row)} tokens."
            )


def _is_scored(item: ScheduledSequence, state: SequenceState) -> bool:
    """Whether a step of one token may score a token of the prompt."""
    return state.prompt_logprobs_from is not None and item.start < state.num_prompt_tokens - 1


def _scored_runs(
    items: Sequence[ScheduledSequence], states: Sequence[SequenceState]
) -> tuple[ScoredRun, ...]:
    """The scheduled positions whose next token is of the prompt and wanted."""
    runs = []
    for index, (item, state) in enumerate(zip(items, states, strict=True)):
        if state.prompt_logprobs_from is not None:
            start = max(item.start, state.prompt_logprobs_from - 1)
            end = min(item.start + item.num_tokens, state.num_prompt_tokens - 1)
            if start < end:
                runs.append(ScoredRun(index, start, end - start))
    return tuple(runs)


def _logits_indices(
    items: Sequence[ScheduledSequence], ends: np.ndarray, scored: Sequence[ScoredRun]
) -> np.ndarray:
    """[M] int64, in the order ForwardBatch promises. ends: [S], one past each run's last row."""
    last: np.ndarray = ends[np.array([item.samples for item in items], bool)] - 1
    if not scored:
        return last
    runs = []
    for run in scored:
        item = items[run.index]
        row = int(ends[run.index]) - item.num_tokens + run.start - item.start
        runs.append(np.arange(row, row + run.num_tokens))
    return np.concatenate([last, *runs])
