"""From a Schedule and what the runner remembers to a ForwardBatch."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from moestro.core.step import Schedule, ScheduledSequence
from moestro.ops.attention import AttentionMetadata
from moestro.runner.forward_batch import ForwardBatch, ScoredRun
from moestro.runner.page_table import PageTable
from moestro.runner.sequence_state import SequenceState
from moestro.runner.step_inputs import StepInputs


class Span(NamedTuple):
    """Positions [start, start + num_tokens) of a sequence, the last num_drafts of them drafts."""

    start: int
    num_tokens: int
    num_drafts: int


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

    def page_table(self, state: SequenceState) -> np.ndarray:
        """[P] int32, a sequence's pages in order."""
        return self._table.pages_of(state.row)

    @staticmethod
    def span(item: ScheduledSequence, state: SequenceState) -> Span:
        """Where a run lies now that its sequence's tokens and drafts are known."""
        if not item.samples:
            return Span(item.start, item.num_tokens, 0)
        num_known = item.num_tokens - item.num_draft_tokens
        num_drafts = min(item.num_draft_tokens, len(state.drafts))
        return Span(state.num_tokens - num_known, num_known + num_drafts, num_drafts)

    def decode_size(
        self, schedule: Schedule, states: Sequence[SequenceState]
    ) -> tuple[int, tuple[int, ...] | None] | None:
        """Of a step in which every sequence has one known token to compute, and its drafts: tokens
        in all, and those of each sequence (None where that is one); None for another step."""
        drafting = False
        for item in schedule.sequences:
            if item.num_tokens != 1 + item.num_draft_tokens or not item.samples:
                return None
            if item.num_draft_tokens:
                drafting = True
        if not drafting:
            return len(states), None
        widths = tuple(
            1 + min(item.num_draft_tokens, len(state.drafts))
            for item, state in zip(schedule.sequences, states, strict=True)
        )
        num_tokens = sum(widths)
        return num_tokens, None if num_tokens == len(states) else widths

    def fill_decode(
        self,
        schedule: Schedule,
        states: Sequence[SequenceState],
        widths: tuple[int, ...] | None,
        inputs: StepInputs,
    ) -> int:
        """Write a step of decode_size into `inputs`; its longest length.

        Raises ValueError as build does.
        """
        table, size, count = self._table, self._table.page_size, len(states)
        ids, positions, slots, rows, lengths = [], [], [], [], []
        for i, (item, state) in enumerate(zip(schedule.sequences, states, strict=True)):
            start, row = state.num_tokens - 1, state.row
            end = start + (1 if widths is None else widths[i])
            if item.new_pages:
                table.append(row, item.new_pages)
            if item.start != start or end > table.capacity(row):
                self._check(item, state, self.span(item, state))
            for position in range(start, end):
                ids.append(state.token_at(position))
                positions.append(position)
                page, offset = divmod(position, size)
                slots.append(table.pages.item(row, page) * size + offset)
            lengths.append(end)
            rows.append(row)
        num_tokens, longest = len(ids), max(lengths)
        inputs.ids[:num_tokens] = ids
        inputs.positions[:num_tokens] = positions
        inputs.slots[:num_tokens] = slots
        inputs.seq_lens[:count] = lengths
        width = -(-longest // size)
        if inputs.table_of != (table.version, width, rows):
            table.pages[:, :width].take(rows, axis=0, out=inputs.table[:count, :width])
            inputs.table_of = (table.version, width, rows)
        if inputs.widths != (count, widths):
            inputs.starts[1 : count + 1] = np.cumsum(widths or [1] * count)
            inputs.widths = (count, widths)
        return longest

    def build(self, schedule: Schedule, states: Sequence[SequenceState]) -> ForwardBatch:
        """The batch of a non-empty schedule. Raises ValueError when the two disagree."""
        items, spans = schedule.sequences, []
        for item, state in zip(items, states, strict=True):
            if item.new_pages:
                self._table.append(state.row, item.new_pages)
            span = self.span(item, state)
            self._check(item, state, span)
            spans.append(span)
        starts = np.array([span.start for span in spans], np.int64)
        lens = np.array([span.num_tokens for span in spans], np.int64)
        ends = np.cumsum(lens)
        pairs = zip(spans, states, strict=True)
        if int(ends[-1]) == len(items):
            positions = starts
            input_ids = np.array([s.token_at(p.start) for p, s in pairs], np.int64)
        else:
            positions = np.repeat(starts - ends + lens, lens) + np.arange(ends[-1])
            input_ids = np.concatenate([s.tokens_at(p.start, p.num_tokens) for p, s in pairs])
        sampled = tuple(i for i, item in enumerate(items) if item.samples)
        draws = tuple(1 + spans[i].num_drafts for i in sampled)
        scored = _scored_runs(spans, states)
        return ForwardBatch(
            input_ids=torch.from_numpy(input_ids),
            positions=torch.from_numpy(positions),
            attention=self._attention(states, starts, lens, positions),
            logits_indices=torch.from_numpy(_logits_indices(spans, ends, sampled, scored)),
            sampled=sampled,
            draws=draws,
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

    def _check(self, item: ScheduledSequence, state: SequenceState, span: Span) -> None:
        start, num_tokens, num_drafts = span
        known, num_known = state.num_tokens, num_tokens - num_drafts
        fits = num_known > 0 and 0 <= start <= known - num_known
        if not (fits and start <= item.start <= start + state.num_unsaid):
            raise ValueError(
                f"sequence {item.seq_id} is scheduled for positions [{item.start}, "
                f"{item.start + item.num_tokens}) with samples={item.samples} and "
                f"{item.num_draft_tokens} drafts, but {known} of its tokens are known."
            )
        end = start + num_tokens
        if end > self._table.capacity(state.row):
            raise ValueError(
                f"sequence {item.seq_id} is scheduled up to position {end}, but its pages hold "
                f"{self._table.capacity(state.row)} tokens."
            )


def _scored_runs(spans: Sequence[Span], states: Sequence[SequenceState]) -> tuple[ScoredRun, ...]:
    """The scheduled positions whose next token is of the prompt and wanted."""
    runs = []
    for index, (span, state) in enumerate(zip(spans, states, strict=True)):
        if state.prompt_logprobs_from is not None:
            start = max(span.start, state.prompt_logprobs_from - 1)
            end = min(span.start + span.num_tokens, state.num_prompt_tokens - 1)
            if start < end:
                runs.append(ScoredRun(index, start, end - start))
    return tuple(runs)


def _logits_indices(
    spans: Sequence[Span], ends: np.ndarray, sampled: Sequence[int], scored: Sequence[ScoredRun]
) -> np.ndarray:
    """[M] int64, in the order ForwardBatch promises. ends: [S], one past each run's last row."""
    if not scored and all(span.num_drafts == 0 for span in spans):
        last: np.ndarray = ends[list(sampled)] - 1
        return last
    rows = [ends[i] - 1 - np.arange(spans[i].num_drafts, -1, -1) for i in sampled]
    for run in scored:
        span = spans[run.index]
        row = int(ends[run.index]) - span.num_tokens + run.start - span.start
        rows.append(np.arange(row, row + run.num_tokens))
    return np.concatenate(rows) if rows else np.zeros(0, np.int64)
