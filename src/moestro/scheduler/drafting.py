"""How many tokens to draft for a sequence, and DraftRoom: what limits it in one step."""

from typing import Protocol

from moestro.core.request import Sequence


class DraftPolicy(Protocol):
    """Decides how many drafts pay. The scheduler tells it what became of them.

    Nothing that is said depends on it, only how fast.
    """

    def num_drafts(self, seq: Sequence, num_running: int) -> int:
        """Drafts to propose for the step after `seq`'s next, beside num_running other rows."""

    def note_output(self, seq: Sequence, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """So many drafts (at least 1) of `seq` were verified, the first so many accepted."""

    def note_step(
        self, num_sequences: int, num_rows: int, num_drafted: int, seconds: float
    ) -> None:
        """A step without prefill verified num_rows rows of num_sequences sequences, proposed at
        most num_drafted drafts, and took so long."""

    def forget(self, seq_id: int) -> None:
        """The sequence has ended."""


class FixedDrafts:
    """Always the same number of drafts."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def num_drafts(self, seq: Sequence, num_running: int) -> int:  # noqa: ARG002
        """See DraftPolicy."""
        return self._num_drafts

    def note_output(self, seq: Sequence, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """See DraftPolicy."""

    def note_step(
        self, num_sequences: int, num_rows: int, num_drafted: int, seconds: float
    ) -> None:
        """See DraftPolicy."""

    def forget(self, seq_id: int) -> None:
        """See DraftPolicy."""


class DraftRoom:
    """What drafts may take in the step being planned: tokens and pages that nobody else needs.

    num_rows: decode rows of the step. tokens_left: drafts that the token budget still allows.
    num_growing: decode rows not planned yet that need a page without any draft, so that drafts
    take none of theirs.
    """

    def __init__(self, policy: DraftPolicy, page_size: int, max_positions: int) -> None:
        self.policy = policy
        self.num_rows = 0
        self.tokens_left = 0
        self.num_growing = 0
        self._page_size = page_size
        self._max_positions = max_positions

    def open_step(self, num_rows: int, tokens_left: int, num_growing: int) -> None:
        """Start planning a step."""
        self.num_rows = num_rows
        self.tokens_left = tokens_left
        self.num_growing = num_growing

    def num_positions(self, seq: Sequence, num_available_pages: int) -> int:
        """Positions that `seq` has, or can have, without taking a page from another row."""
        num_pages = len(seq.pages) + max(0, num_available_pages - self.num_growing)
        return min(self._max_positions, num_pages * self._page_size)
