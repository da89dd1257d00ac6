"""From logits to tokens and log probabilities, for sequences with options of their own."""

from collections.abc import Sequence

import numpy as np
import torch

from moestro.backends.base import CapturedStep, GraphPool
from moestro.core.step import SequenceOutput, TokenLogprobs
from moestro.errors import UnsupportedError
from moestro.ops.logit_edits import TokenMask
from moestro.ops.sampling import (
    NO_TOKEN,
    RankedLogprobs,
    SampledRows,
    SamplingBatch,
    SamplingMetadata,
    sample,
    token_logprobs,
)
from moestro.runner.batch_edits import BiasRows, CountRows
from moestro.runner.sequence_state import SequenceState

_NOT_FINITE = (
    "the model produced logits that are not finite (NaN or infinity) for this sequence; its "
    "weights may be damaged or too large for the compute dtype."
)
_NOTHING_ALLOWED = (
    "no token is allowed here: grammar, logit_bias and min_tokens together forbid every one."
)


class Sampler:
    """Draws the next token of each sequence of a batch, in one call of ops.sample.

    The options of the batch's rows lie in arrays that are kept as long as the batch stays the
    same sequences in the same order; from step to step only positions change, and what the last
    token added to penalties. pool: captures the call where it comes again with the same arrays:
    replaying it takes a tenth of the host's time.
    """

    __slots__ = (
        "_batch",
        "_bias",
        "_captured",
        "_counts",
        "_logits",
        "_pool",
        "_position",
        "_states",
    )

    def __init__(self, pool: GraphPool | None = None) -> None:
        self._pool = pool
        self._states: list[SequenceState] = []
        self._captured: CapturedStep | None = None
        self._logits: torch.Tensor | None = None  # what the last call drew from in place
        self._prepare()

    def sample(
        self,
        logits: torch.Tensor,
        states: Sequence[SequenceState],
        masks: Sequence[bytes | None],
        *,
        in_place: bool = False,
    ) -> list[SequenceOutput]:
        """Draw one token a row; row i of logits [S, V] fp32 belongs to states[i].

        masks: grammar bits (see core.grammar) or None. in_place: this tensor is written anew and
        handed over again for a later step. A sequence that can't go on gets an error; its
        neighbours don't notice. logits are as they were afterwards.
        """
        if self._states != states:
            self._states = list(states)
            self._prepare()
        self._position[:] = [state.num_tokens for state in states]
        batch = self._batch
        bias, counts, mask = self._bias.update(), self._counts.update(), None
        if any(masks):
            mask = _token_mask(masks, logits.shape[1])
        if bias is not None or counts is not None or mask is not None:
            batch = SamplingBatch(
                batch.metadata, bias, mask, counts, batch.num_logprobs, batch.max_logprobs
            )
        drawn = self._draw(logits, batch) if in_place else sample(logits, batch)
        token_ids: list[int] = drawn.token_ids.tolist()
        if drawn.logprobs is None and min(token_ids, default=0) >= 0:
            return [SequenceOutput(s.seq_id, (t,)) for s, t in zip(states, token_ids, strict=True)]
        return self._outputs(token_ids, drawn.finite.tolist(), drawn.logprobs)

    def release(self) -> None:
        """Forget the last batch's sequences."""
        self._states = []
        self._prepare()

    def _draw(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledRows:
        """sample, captured when it comes a second time in a row with the same arrays."""
        drawn: SampledRows
        if self._pool is None or batch is not self._batch:
            drawn = sample(logits, batch)
            return drawn
        if logits is not self._logits:
            self._logits, self._captured = logits, None
            drawn = sample(logits, batch)
            return drawn
        if self._captured is not None and self._captured.is_current():
            self._captured.replay()
        else:
            try:
                self._captured = self._pool.capture(lambda: sample(logits, batch))
            except UnsupportedError:
                self._pool = None  # this device's sampling is no list of kernel calls
                drawn = sample(logits, batch)
                return drawn
        drawn = self._captured.result
        return drawn

    def _prepare(self) -> None:
        """Lay out the options of self._states."""
        self._captured = self._logits = None
        states = self._states
        metadata = _metadata(states)
        self._position = metadata.position.numpy()
        wanted = [-1 if s.params.logprobs is None else s.params.logprobs for s in states]
        top = max(wanted, default=-1)
        self._batch = SamplingBatch(
            metadata,
            num_logprobs=torch.tensor(wanted, dtype=torch.int64) if top >= 0 else None,
            max_logprobs=max(top, 0),
        )
        self._bias, self._counts = BiasRows(states), CountRows(states)

    def _outputs(
        self, token_ids: list[int], finite: list[bool], ranked: RankedLogprobs | None
    ) -> list[SequenceOutput]:
        outputs = []
        columns = None if ranked is None else _columns(ranked)
        for i, (state, token_id) in enumerate(zip(self._states, token_ids, strict=True)):
            if token_id == NO_TOKEN:
                error = _NOTHING_ALLOWED if finite[i] else _NOT_FINITE
                outputs.append(SequenceOutput(state.seq_id, error=error))
                continue
            top = state.params.logprobs
            of_token = () if columns is None or top is None else (_entry(*columns[i], top),)
            outputs.append(SequenceOutput(state.seq_id, (token_id,), of_token))
        return outputs


def score_prompt(
    logits: torch.Tensor, state: SequenceState, start: int
) -> tuple[tuple[TokenLogprobs, ...], str | None]:
    """Score the prompt tokens after positions start, start + 1, ...; one row of logits each.

    Returns the entries, or none and an error when the logits are not finite.
    """
    token_ids = torch.from_numpy(state.token_ids[start + 1 : start + 1 + len(logits)])
    num_top = state.params.prompt_logprobs or 0
    columns = _columns(token_logprobs(logits, token_ids, num_top))
    if any(ranks[0] == 0 for _, _, ranks in columns):
        return (), _NOT_FINITE
    return tuple(_entry(*column, num_top) for column in columns), None


def _columns(ranked: RankedLogprobs) -> list[tuple[list[int], list[float], list[int]]]:
    """Row by row: token ids, log probabilities, ranks."""
    lists = (ranked.token_ids.tolist(), ranked.logprobs.tolist(), ranked.ranks.tolist())
    return list(zip(*lists, strict=True))


def _entry(ids: list[int], values: list[float], ranks: list[int], top: int) -> TokenLogprobs:
    """The token's own and `top` more, or as many as the vocabulary has."""
    count = min(1 + top, len(ids) if NO_TOKEN not in ids else ids.index(NO_TOKEN))
    return TokenLogprobs(tuple(ids[:count]), tuple(values[:count]), tuple(ranks[:count]))


def _token_mask(masks: Sequence[bytes | None], vocab_size: int) -> TokenMask:
    width = -(-vocab_size // 8)
    given = [mask for mask in masks if mask is not None]
    for mask in given:
        if len(mask) != width:
            raise ValueError(
                f"a grammar mask holds {len(mask)} bytes; {vocab_size} tokens need {width}."
            )
    bits = np.frombuffer(bytearray(b"".join(given)), np.uint8)
    has = np.array([mask is not None for mask in masks])
    rows = np.where(has, has.cumsum() - 1, -1)
    return TokenMask(torch.from_numpy(rows), torch.from_numpy(bits).view(len(given), width))


def _metadata(states: Sequence[SequenceState]) -> SamplingMetadata:
    params = [state.params for state in states]
    return SamplingMetadata(
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float64),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float64),
        seed=torch.tensor([s.seed for s in states], dtype=torch.int64),
        sample_index=torch.tensor([s.sample_index for s in states], dtype=torch.int64),
        position=torch.tensor([s.num_tokens for s in states], dtype=torch.int64),
    )
