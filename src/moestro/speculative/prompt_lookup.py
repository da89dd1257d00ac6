"""PromptLookup: what stood behind the last tokens before may stand behind them again."""

from collections.abc import Sequence

import numpy as np

from moestro.speculative.drafter import ComputedStep, DraftedSequence
from moestro.speculative.ngram_index import Match, NgramIndex


class PromptLookup:
    """A Drafter that copies from the sequence itself, prompt and output.

    It looks for the last `longest` tokens, then for fewer, down to `shortest`, and copies what
    followed their most recent earlier place: text is most like what came just before. A copy that
    reaches the end of the sequence goes on with itself, so that a loop is drafted whole. Source:
    Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self.longest = longest
        self._shortest = shortest
        self._indexes: dict[int, NgramIndex] = {}

    @property
    def reads_hidden_states(self) -> bool:
        return False

    def propose(self, step: ComputedStep) -> list[tuple[int, ...]]:
        return [self.find(sequence)[0] for sequence in step.sequences]

    def find(self, sequence: DraftedSequence) -> tuple[tuple[int, ...], int]:
        """Drafts, and how many tokens before them agree with the place they come from."""
        if not sequence.num_wanted:
            return (), 0
        index = self._indexes.get(sequence.seq_id)
        if index is None:
            index = self._indexes[sequence.seq_id] = NgramIndex(self._shortest, self.longest)
        match = index.find(sequence.token_ids)
        if match is None:
            return (), 0
        return copied(sequence.token_ids, match, sequence.num_wanted), match.length

    def release(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._indexes.pop(seq_id, None)

    def warm_up(self, sizes: Sequence[int]) -> None:
        """Nothing is captured."""

    def close(self) -> None:
        self._indexes.clear()


def copied(token_ids: np.ndarray, match: Match, count: int) -> tuple[int, ...]:
    """`count` tokens from the match's end on, and on with themselves where the sequence ends."""
    found: list[int] = token_ids[match.end : match.end + count].tolist()
    while len(found) < count:
        found += found[: count - len(found)]
    return tuple(found)
