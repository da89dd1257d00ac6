"""SequenceState: what the runner remembers of a sequence between steps."""

import numpy as np

from moestro.core.step import NewSequence
from moestro.ops.noise import signed
from moestro.runner.token_tally import TokenTally


class SequenceState:
    """One sequence from the schedule that names it new to the one that releases it.

    row: its row in the page table. seed: as int64. tally: None without penalties.
    """

    __slots__ = (
        "_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "params",
        "prompt_logprobs_from",
        "row",
        "sample_index",
        "seed",
        "seq_id",
        "stop_token_ids",
        "tally",
    )

    def __init__(self, new: NewSequence, row: int) -> None:
        self.seq_id = new.seq_id
        self.row = row
        self.params = new.params
        self.seed = signed(new.seed)
        self.sample_index = new.sample_index
        self.stop_token_ids = tuple(sorted(new.stop_token_ids))
        self.num_prompt_tokens = new.num_prompt_tokens
        self.prompt_logprobs_from = new.prompt_logprobs_from
        self.num_tokens = len(new.token_ids)
        self._tokens = np.array(new.token_ids, dtype=np.int64)
        self.tally: TokenTally | None = None
        if new.params.has_penalties:
            prompt, output = np.split(self._tokens, [new.num_prompt_tokens])
            self.tally = TokenTally(prompt, output)

    @property
    def token_ids(self) -> np.ndarray:
        """[num_tokens] int64, prompt and output."""
        return self._tokens[: self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def append(self, token_id: int) -> None:
        """Remember a sampled token."""
        if self.num_tokens == len(self._tokens):
            self._tokens = np.append(self._tokens, np.zeros(self.num_tokens // 2 + 16, np.int64))
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        if self.tally is not None:
            self.tally.add(token_id)

    def token_at(self, position: int) -> int:
        return self._tokens.item(position)
