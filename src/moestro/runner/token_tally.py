"""TokenTally: which tokens a sequence has seen, for the penalties."""

import numpy as np

_GROWTH = 64


class TokenTally:
    """The distinct tokens of prompt and output, with their number of occurrences in the output.

    Sparse: as long as the sequence at most, whatever the vocabulary. num_added: output tokens
    counted so far.
    """

    __slots__ = ("_counts", "_index", "_size", "_token_ids", "num_added")

    def __init__(self, prompt: np.ndarray, output: np.ndarray) -> None:
        """prompt, output: [*] int64."""
        distinct = np.unique(prompt)
        self._index = {token: at for at, token in enumerate(distinct.tolist())}
        self._size = len(distinct)
        self._token_ids = np.append(distinct, np.zeros(_GROWTH, np.int64))
        self._counts = np.zeros(len(self._token_ids), np.int64)
        self.num_added = 0
        for token in output.tolist():
            self.add(token)

    @property
    def token_ids(self) -> np.ndarray:
        """[N] int64, distinct."""
        return self._token_ids[: self._size]

    @property
    def counts(self) -> np.ndarray:
        """[N] int64, occurrences in the output; 0 for a token of the prompt only."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """Count one more output token."""
        at = self._index.get(token_id)
        if at is None:
            at = self._index[token_id] = self._size
            if at == len(self._token_ids):
                self._token_ids = np.append(self._token_ids, np.zeros(at, np.int64))
                self._counts = np.append(self._counts, np.zeros(at, np.int64))
            self._token_ids[at] = token_id
            self._size += 1
        self._counts[at] += 1
        self.num_added += 1

    def entry_of(self, token_id: int) -> int | None:
        """Where a token lies in token_ids; None before it has been seen."""
        return self._index.get(token_id)
