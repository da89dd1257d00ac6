"""BiasRows and CountRows: a batch's logit edits in flat arrays, kept up to date between steps."""

from collections.abc import Sequence

import numpy as np
import torch

from moestro.ops.logit_edits import TokenBias, TokenCounts
from moestro.runner.sequence_state import Bias, SequenceState
from moestro.runner.token_tally import TokenTally

_SLACK = 64
"""Entries of room for the distinct tokens that a row will add, before all are laid out anew."""

_FEW = 8
"""So many new tokens are counted one by one; more are copied with all others."""

Row = tuple[SequenceState, int]
"""The draw of a sequence behind so many of its drafts."""


class BiasRows:
    """logit_bias, and the stop tokens that min_tokens still suppresses, of a batch's rows."""

    __slots__ = ("_bias", "_held", "_num_rows", "_rows")

    def __init__(self, rows: Sequence[Row]) -> None:
        self._num_rows = len(rows)
        self._rows = [
            (at, state, depth)
            for at, (state, depth) in enumerate(rows)
            if state.params.logit_bias or (state.params.min_tokens and state.stop_token_ids)
        ]
        self._held: list[Bias] = []
        self._bias: TokenBias | None = None

    def update(self) -> TokenBias | None:
        """The biases of the coming step, None when no row has any."""
        if not self._rows:
            return None
        now = [state.token_bias(depth) for _, state, depth in self._rows]
        same = len(now) == len(self._held) and all(
            a is b for a, b in zip(now, self._held, strict=True)
        )
        if not same:
            self._held = now
            self._bias = self._lay_out()
        return self._bias

    def _lay_out(self) -> TokenBias | None:
        sizes = np.zeros(self._num_rows, np.int64)
        sizes[[at for at, _, _ in self._rows]] = [len(ids) for ids, _ in self._held]
        if not sizes.any():
            return None
        arrays = (
            sizes.cumsum() - sizes,
            sizes,
            np.concatenate([ids for ids, _ in self._held]),
            np.concatenate([values for _, values in self._held]),
        )
        return TokenBias(*map(torch.from_numpy, arrays))


class _CountedRow:
    """One row: `seen` output tokens of its sequence are in its segment, and some of the drafts."""

    __slots__ = ("at", "depth", "extra", "seen", "state", "tally")

    def __init__(self, at: int, state: SequenceState, tally: TokenTally, depth: int) -> None:
        self.at, self.state, self.tally, self.depth = at, state, tally, depth
        self.seen = 0
        self.extra: list[int] = []
        """Entries that a draft added one to."""


class CountRows:
    """The tokens that a batch's penalties act on, a segment with room to grow each row.

    A row's segment begins with the entries of its sequence's tally, in their order; those that
    only its drafts add come behind them.
    """

    __slots__ = ("_counts", "_ids", "_output_counts", "_rows", "_sizes", "_starts")

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = [
            _CountedRow(at, state, state.tally, depth)
            for at, (state, depth) in enumerate(rows)
            if state.tally is not None
        ]
        self._counts: TokenCounts | None = None
        if self._rows:
            self._sizes = np.zeros(len(rows), np.int64)
            self._starts = np.zeros(len(rows), np.int64)
            params = [
                (s.params.repetition_penalty, s.params.frequency_penalty, s.params.presence_penalty)
                for s, _ in rows
            ]
            self._lay_out(*torch.tensor(list(zip(*params, strict=True)), dtype=torch.float64))

    def update(self) -> TokenCounts | None:
        """The counts of the coming step, None when no row has penalties."""
        for row in self._rows:
            if not self._catch_up(row):
                counts = self._counts
                assert counts is not None
                self._lay_out(counts.repetition, counts.frequency, counts.presence)
                break
        for row in self._rows:
            if row.depth:
                self._add_drafts(row)
        return self._counts

    def _catch_up(self, row: _CountedRow) -> bool:
        """Bring a row's segment to its sequence's tokens; False where it has no room for them."""
        start, tally = int(self._starts[row.at]), row.tally
        for entry in row.extra:
            self._output_counts[start + entry] -= 1
        row.extra = []
        size = len(tally.token_ids)
        last = row.at + 1 == len(self._starts)
        end = len(self._ids) if last else int(self._starts[row.at + 1])
        if start + size + row.depth > end:
            return False
        self._sizes[row.at] = size
        added = tally.num_added - row.seen
        row.seen = tally.num_added
        if added > _FEW:
            self._ids[start : start + size] = tally.token_ids
            self._output_counts[start : start + size] = tally.counts
        elif added:
            for token_id in row.state.token_ids[-added:].tolist():
                at = tally.entry_of(token_id)
                assert at is not None
                self._ids[start + at] = token_id
                self._output_counts[start + at] = tally.counts[at]
        return True

    def _add_drafts(self, row: _CountedRow) -> None:
        start, size = int(self._starts[row.at]), len(row.tally.token_ids)
        own: dict[int, int] = {}
        for token_id in row.state.drafts[: row.depth]:
            entry = row.tally.entry_of(token_id)
            if entry is None:
                if token_id not in own:
                    own[token_id] = size + len(own)
                    self._ids[start + own[token_id]] = token_id
                    self._output_counts[start + own[token_id]] = 0
                entry = own[token_id]
            self._output_counts[start + entry] += 1
            row.extra.append(entry)
        self._sizes[row.at] = size + len(own)

    def _lay_out(
        self, repetition: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor
    ) -> None:
        room = np.zeros(len(self._sizes), np.int64)
        for row in self._rows:
            self._sizes[row.at] = len(row.tally.token_ids)
            room[row.at] = len(row.tally.token_ids) + row.depth + _SLACK
        self._starts[:] = room.cumsum() - room
        self._ids = np.zeros(int(room.sum()), np.int64)
        self._output_counts = np.zeros(len(self._ids), np.int64)
        for row in self._rows:
            start = self._starts[row.at]
            self._ids[start : start + self._sizes[row.at]] = row.tally.token_ids
            self._output_counts[start : start + self._sizes[row.at]] = row.tally.counts
            row.seen, row.extra = row.tally.num_added, []
        self._counts = TokenCounts(
            torch.from_numpy(self._starts),
            torch.from_numpy(self._sizes),
            torch.from_numpy(self._ids),
            torch.from_numpy(self._output_counts),
            repetition,
            frequency,
            presence,
        )
