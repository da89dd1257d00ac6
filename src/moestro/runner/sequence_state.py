"""SequenceState: what the runner remembers of a sequence between steps."""

from collections.abc import Mapping

import numpy as np

from moestro.core.step import NewSequence
from moestro.ops.noise import signed
from moestro.runner.token_tally import TokenTally

Bias = tuple[np.ndarray, np.ndarray]
"""[N] int64 distinct token ids, [N] fp32 values."""

_NO_BIAS: Bias = (np.zeros(0, np.int64), np.zeros(0, np.float32))


class SequenceState:
    """One sequence from the schedule that names it new to the one that releases it.

    row: its row in the page table. seed: as int64. tally: None without penalties. drafts: proposed
    as its next tokens. num_unsaid: tokens that its last two runs could have said beyond those they
    did: a run planned while they were in flight may begin so far ahead.
    """

    __slots__ = (
        "_biases",
        "_last_unsaid",
        "_tokens",
        "drafts",
        "num_prompt_tokens",
        "num_tokens",
        "num_unsaid",
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
        self._biases: list[Bias | None] = [None, None]
        self.drafts: tuple[int, ...] = ()
        self.num_unsaid = 0
        self._last_unsaid = 0
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

    def token_bias(self, num_drafts: int = 0) -> Bias:
        """What is added to logits of the token after so many drafts.

        logit_bias, and -inf for the stop tokens that min_tokens holds back. Kept between steps: a
        bias of the whole vocabulary costs as much to read as a step of a small batch.
        """
        holds_stops = self.num_output_tokens + num_drafts < self.params.min_tokens
        bias = self._biases[holds_stops]
        if bias is None:
            biases = dict(self.params.logit_bias)
            if holds_stops:
                biases.update(dict.fromkeys(self.stop_token_ids, float("-inf")))
            bias = self._biases[holds_stops] = _as_arrays(biases) if biases else _NO_BIAS
        return bias

    def append(self, token_id: int) -> None:
        """Remember a sampled token."""
        if self.num_tokens == len(self._tokens):
            self._grow(1)
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        if self.tally is not None:
            self.tally.add(token_id)

    def end_run(self, num_draws: int, num_said: int) -> None:
        """A run planned with so many draws said so many tokens; its drafts are used up."""
        self.num_unsaid = self._last_unsaid + num_draws - num_said
        self._last_unsaid = num_draws - num_said
        self.drafts = ()

    def propose(self, drafts: tuple[int, ...]) -> None:
        """Put drafts behind the known tokens, in place of earlier ones."""
        self.drafts = drafts
        if drafts:
            if self.num_tokens + len(drafts) > len(self._tokens):
                self._grow(len(drafts))
            self._tokens[self.num_tokens : self.num_tokens + len(drafts)] = drafts

    def token_at(self, position: int) -> int:
        """A known token, or a draft."""
        return self._tokens.item(position)

    def tokens_at(self, start: int, count: int) -> np.ndarray:
        """[count] int64, known tokens and drafts."""
        return self._tokens[start : start + count]

    def _grow(self, room: int) -> None:
        more = np.zeros(self.num_tokens // 2 + 16 + room, np.int64)
        self._tokens = np.append(self._tokens, more)


def _as_arrays(biases: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.fromiter(biases.keys(), np.int64, len(biases)),
        np.fromiter(biases.values(), np.float32, len(biases)),
    )
