"""BiasRows and CountRows: a batch's logit edits in flat arrays, kept up to date between steps."""

from collections.abc import Sequence

import numpy as np
import torch

from moestro.ops.logit_edits import TokenBias, TokenCounts
from moestro.runner.sequence_state import SequenceState
from moestro.runner.token_tally import TokenTally

_SLACK = 64
"""Entries of room for the distinct tokens that a row will add, before all are laid out anew."""


class BiasRows:
    """logit_bias, and the stop tokens that min_tokens still suppresses, of a batch's rows."""

    __slots__ = ("_bias", "_held", "_num_rows", "_rows")

    def __init__(self, states: Sequence[SequenceState]) -> None:
        self._num_rows = len(states)
        self._rows = [
            (row, state)
            for row, state in enumerate(states)
            if state.params.logit_bias or (state.params.min_tokens and state.stop_token_ids)
        ]
        self._held: list[tuple[np.ndarray, np.ndarray]] = []
        self._bias: TokenBias | None = None

    def update(self) -> TokenBias | None:
        """The biases of the coming step, None when no row has any."""
        if not self._rows:
            return None
        now = [state.token_bias() for _, state in self._rows]
        same = len(now) == len(self._held) and all(
            a is b for a, b in zip(now, self._held, strict=True)
        )
        if not same:
            self._held = now
            self._bias = self._lay_out()
        return self._bias

    def _lay_out(self) -> TokenBias | None:
        sizes = np.zeros(self._num_rows, np.int64)
        sizes[[row for row, _ in self._rows]] = [len(ids) for ids, _ in self._held]
        if not sizes.any():
            return None
        arrays = (
            sizes.cumsum() - sizes,
            sizes,
            np.concatenate([ids for ids, _ in self._held]),
            np.concatenate([values for _, values in self._held]),
        )
        return TokenBias(*map(torch.from_numpy, arrays))


class CountRows:
    """The tokens that a batch's penalties act on, a segment with room to grow each row."""

    __slots__ = ("_counts", "_ids", "_output_counts", "_rows", "_seen", "_sizes", "_starts")

    def __init__(self, states: Sequence[SequenceState]) -> None:
        self._rows: list[tuple[int, TokenTally]] = [
            (row, state.tally) for row, state in enumerate(states) if state.tally is not None
        ]
        self._counts: TokenCounts | None = None
        if self._rows:
            self._sizes = np.zeros(len(states), np.int64)
            self._starts = np.zeros(len(states), np.int64)
            params = [
                (s.params.repetition_penalty, s.params.frequency_penalty, s.params.presence_penalty)
                for s in states
            ]
            self._lay_out(*torch.tensor(list(zip(*params, strict=True)), dtype=torch.float64))

    def update(self) -> TokenCounts | None:
        """The counts of the coming step, None when no row has penalties."""
        for at, (row, tally) in enumerate(self._rows):
            added = tally.num_added - self._seen[at]
            if added == 0:
                continue
            self._seen[at] = tally.num_added
            size = len(tally.token_ids)
            start = int(self._starts[row])
            end = self._starts[row + 1] if row + 1 < len(self._starts) else len(self._ids)
            if start + size > end:
                counts = self._counts
                assert counts is not None
                self._lay_out(counts.repetition, counts.frequency, counts.presence)
                break
            self._sizes[row] = size
            if added == 1:
                entry = tally.last_entry
                self._ids[start + entry] = tally.token_ids[entry]
                self._output_counts[start + entry] = tally.counts[entry]
            else:
                self._ids[start : start + size] = tally.token_ids
                self._output_counts[start : start + size] = tally.counts
        return self._counts

    def _lay_out(
        self, repetition: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor
    ) -> None:
        room = np.zeros(len(self._sizes), np.int64)
        for row, tally in self._rows:
            self._sizes[row] = len(tally.token_ids)
            room[row] = len(tally.token_ids) + _SLACK
        self._starts[:] = room.cumsum() - room
        self._ids = np.zeros(int(room.sum()), np.int64)
        self._output_counts = np.zeros(len(self._ids), np.int64)
        for row, tally in self._rows:
            start = self._starts[row]
            self._ids[start : start + self._sizes[row]] = tally.token_ids
            self._output_counts[start : start + self._sizes[row]] = tally.counts
        self._seen = [tally.num_added for _, tally in self._rows]
        self._counts = TokenCounts(
            torch.from_numpy(self._starts),
            torch.from_numpy(self._sizes),
            torch.from_numpy(self._ids),
            torch.from_numpy(self._output_counts),
            repetition,
            frequency,
            presence,
        )
