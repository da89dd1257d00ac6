"""ForwardBatch: all that one forward pass reads, complete when it is made."""

from dataclasses import dataclass

import torch

from moestro.ops.attention import AttentionMetadata


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """Prompt rows of one sequence whose next token is scored.

    index: place in Schedule.sequences; positions [start, start + num_tokens) score the prompt
    tokens one further on.
    """

    index: int
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's tensors, sequences in schedule order.

    input_ids, positions: [T] int64. logits_indices: [M] int64, the rows of the hidden states that
    need logits: first, for each sequence in `sampled` (places in Schedule.sequences), those of its
    last known token and its drafts, as many as `draws` says; then the rows of each run in `scored`.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    logits_indices: torch.Tensor
    sampled: tuple[int, ...]
    draws: tuple[int, ...]
    scored: tuple[ScoredRun, ...]
