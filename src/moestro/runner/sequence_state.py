"""SequenceState: what the runner remembers of a sequence between steps."""

from collections.abc import Mapping

import numpy as np

from moestro.core.step import NewSequence
from moestro.ops.noise import signed
from moestro.runner.token_tally import TokenTally

_NO_BIAS = (np.zeros(0, np.int64), np.zeros(0, np.float32))


class SequenceState:
    """One sequence from the schedule that names it new to the one that releases it.

    row: its row in the page table. seed: as int64. tally: None without penalties.
    """

    __slots__ = (
        "_bias",
        "_bias_holds_stops",
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
        self._bias = _NO_BIAS
        self._bias_holds_stops: bool | None = None
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

    def token_bias(self) -> tuple[np.ndarray, np.ndarray]:
        """What is added to logits of the next token: [N] int64 distinct ids, [N] fp32 values.

        logit_bias, and -inf for the stop tokens that min_tokens holds back. Kept between steps: a
        bias of the whole vocabulary costs as much to read as a step of a small batch.
        """
        holds_stops = self.num_output_tokens < self.params.min_tokens
        if holds_stops is not self._bias_holds_stops:
            self._bias_holds_stops = holds_stops
            biases = dict(self.params.logit_bias)
            if holds_stops:
                biases.update(dict.fromkeys(self.stop_token_ids, float("-inf")))
            self._bias = _as_arrays(biases) if biases else _NO_BIAS
        return self._bias

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


def _as_arrays(biases: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.fromiter(biases.keys(), np.int64, len(biases)),
        np.fromiter(biases.values(), np.float32, len(biases)),
    )
