"""InjectedDrafter: drafts whose acceptance is given, for tests and benchmarks."""

from collections.abc import Callable, Sequence

import numpy as np

from moestro.ops.noise import noise_key
from moestro.speculative.drafter import ComputedStep, DraftedSequence, Drafter

Continuation = Callable[[DraftedSequence], Sequence[int]]
"""What will be said next, as far as it is known."""


class InjectedDrafter:
    """Asks `inner`, whose cost is paid, and proposes something else in place of its drafts.

    Draft j is what will be said with probability acceptance[j], given that those before it are
    (the last number holds for all beyond); else it is another token. The same seed, sequence and
    length give the same drafts. inner None costs nothing; with one, as many drafts as it has.
    """

    def __init__(
        self,
        continuation: Continuation,
        acceptance: Sequence[float],
        vocab_size: int,
        inner: Drafter | None = None,
        seed: int = 0,
    ) -> None:
        self._continuation = continuation
        self._acceptance = tuple(acceptance)
        self._vocab_size = vocab_size
        self._inner = inner
        self._seed = seed

    @property
    def reads_hidden_states(self) -> bool:
        return self._inner is not None and self._inner.reads_hidden_states

    def propose(self, step: ComputedStep) -> list[tuple[int, ...]]:
        if self._inner is None:
            counts = [sequence.num_wanted for sequence in step.sequences]
        else:
            counts = [len(drafts) for drafts in self._inner.propose(step)]
        pairs = zip(step.sequences, counts, strict=True)
        return [self._drafts(sequence, count) for sequence, count in pairs]

    def release(self, seq_ids: Sequence[int]) -> None:
        if self._inner is not None:
            self._inner.release(seq_ids)

    def warm_up(self, sizes: Sequence[int]) -> None:
        if self._inner is not None:
            self._inner.warm_up(sizes)

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()

    def _drafts(self, sequence: DraftedSequence, count: int) -> tuple[int, ...]:
        if not count:
            return ()
        drafts = list(self._continuation(sequence)[:count])
        key = noise_key(self._seed, sequence.seq_id, len(sequence.token_ids))
        chances = np.random.default_rng(key).random(len(drafts))
        for at, chance in enumerate(chances.tolist()):
            if chance >= self._acceptance[min(at, len(self._acceptance) - 1)]:
                drafts[at] = (drafts[at] + 1) % self._vocab_size
                break
        return tuple(drafts)


class KnownTexts:
    """A Continuation that knows whole token lists, prompt and output, one to each prompt."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = [tuple(text) for text in texts]
        self._text_of: dict[int, tuple[int, ...]] = {}

    def __call__(self, sequence: DraftedSequence) -> Sequence[int]:
        text = self._text_of.get(sequence.seq_id)
        length = len(sequence.token_ids)
        if text is None:
            known = tuple(sequence.token_ids.tolist())
            text = next((t for t in self._texts if t[:length] == known), ())
            self._text_of[sequence.seq_id] = text
        return text[length:]
