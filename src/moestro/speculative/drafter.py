"""Drafter: proposes the tokens that a model is likely to say next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from moestro.ops.attention import AttentionMetadata


@dataclass(frozen=True, slots=True)
class DraftedSequence:
    """One sequence that a step has just sampled.

    token_ids: [L] int64, all that is known: prompt and output. row: of the step's rows, the one
    whose draw was the last of token_ids: position L - 2. page_table: [P] int32, its pages in
    order. num_wanted: most drafts to propose, 0 for none.
    """

    seq_id: int
    token_ids: np.ndarray
    row: int
    page_table: np.ndarray
    num_wanted: int


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step whose draws are known, as a drafter sees it.

    hidden_states: [T, N], every row after the trunk's final norm. next_token_ids: [T] int64, the
    token behind each row: the prompt's own, or what the row drew (behind a rejected draft that is
    no token of the sequence; what is computed from it lies beyond all that is known and is
    overwritten before anything reads it). positions: [T] int64. attention: the step's own, its
    slots good for MTP layers too.
    """

    hidden_states: torch.Tensor
    next_token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    sequences: Sequence[DraftedSequence]


class Drafter(Protocol):
    """Called once a step, between its verification and its end."""

    @property
    def reads_hidden_states(self) -> bool:
        """Whether every step must be shown to it, prompts too; else only `sequences` matter."""

    def propose(self, step: ComputedStep) -> list[tuple[int, ...]]:
        """Follow the step, and draft for each of step.sequences; fewer than wanted is fine."""

    def release(self, seq_ids: Sequence[int]) -> None:
        """Forget sequences; one that was preempted comes back later, with all its tokens."""

    def warm_up(self, sizes: Sequence[int]) -> None:
        """Get ready to draft for these numbers of sequences at a time."""

    def close(self) -> None:
        """Give back what it holds. Idempotent."""
