"""HybridDrafter: copies where copying is believed, asks the MTP layers elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moestro.speculative.drafter import ComputedStep, DraftedSequence, Drafter
from moestro.speculative.prompt_lookup import PromptLookup

_ENOUGH = 0.5
"""Share of copied tokens that were said, above which any copy is believed."""

_SOME = 0.25
"""Above which a copy is believed whose place agrees in as many tokens as are compared."""

_KEPT = 0.9
"""What a copied token's weight in that share falls to with each one after it."""


def is_credible(match_length: int, longest: int, share: float | None) -> bool:
    """Whether a copy is worth more than a draft of the MTP layers.

    match_length: tokens before it that agree with the place it comes from, `longest` at most.
    share: of the tokens copied lately, those that were said; None before the first.
    """
    if share is None:
        return match_length >= longest
    return share >= (_SOME if match_length >= longest else _ENOUGH)


@dataclass(slots=True)
class CopyRecord:
    """How well copying did lately in one sequence, whether its copies were used or not."""

    said: float = 0.0
    judged: float = 0.0
    begin: int = 0
    copy: tuple[int, ...] = ()

    @property
    def share(self) -> float | None:
        return self.said / self.judged if self.judged else None

    def judge(self, token_ids: np.ndarray) -> None:
        """Compare the last copy, up to its first wrong token, with what was said in its place."""
        for draft, token in zip(self.copy, token_ids[self.begin :].tolist(), strict=False):
            self.said = self.said * _KEPT + (draft == token)
            self.judged = self.judged * _KEPT + 1.0
            if draft != token:
                break
        self.copy = ()


class HybridDrafter:
    """A Drafter made of two: the lookup's copy where it is credible, else the other's drafts.

    A copy is as long as is wanted and costs nothing, so that a credible one is the longer of the
    two; the other then only follows (its KV must know every token) and drafts for the rest.
    """

    def __init__(self, lookup: PromptLookup, other: Drafter) -> None:
        self._lookup = lookup
        self._other = other
        self._records: dict[int, CopyRecord] = {}

    @property
    def reads_hidden_states(self) -> bool:
        return self._other.reads_hidden_states

    def propose(self, step: ComputedStep) -> list[tuple[int, ...]]:
        copies = [self._copy(sequence) for sequence in step.sequences]
        believed = [bool(drafts) and credible for drafts, credible in copies]
        pairs = zip(step.sequences, believed, strict=True)
        asked = [replace(s, num_wanted=0) if copies else s for s, copies in pairs]
        drafts = self._other.propose(replace(step, sequences=asked))
        return [
            copy if is_believed or not own else own
            for (copy, _), is_believed, own in zip(copies, believed, drafts, strict=True)
        ]

    def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._records.pop(seq_id, None)
        self._lookup.release(seq_ids)
        self._other.release(seq_ids)

    def warm_up(self, sizes: Sequence[int]) -> None:
        self._other.warm_up(sizes)

    def close(self) -> None:
        self._records.clear()
        self._lookup.close()
        self._other.close()

    def _copy(self, sequence: DraftedSequence) -> tuple[tuple[int, ...], bool]:
        """What the lookup found, and whether it is credible."""
        if not sequence.num_wanted:
            return (), False
        record = self._records.setdefault(sequence.seq_id, CopyRecord())
        record.judge(sequence.token_ids)
        drafts, length = self._lookup.find(sequence)
        record.begin, record.copy = len(sequence.token_ids), drafts
        return drafts, is_credible(length, self._lookup.longest, record.share)
