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
from moestro.runner.batch_edits import BiasRows, CountRows, Row
from moestro.runner.sequence_state import SequenceState
from moestro.speculative.verify import num_said

_NOT_FINITE = (
    "the model produced logits that are not finite (NaN or infinity) for this sequence; its "
    "weights may be damaged or too large for the compute dtype."
)
_NOTHING_ALLOWED = (
    "no token is allowed here: grammar, logit_bias and min_tokens together forbid every one."
)


class Sampler:
    """Draws the next tokens of each sequence of a batch, in one call of ops.sample.

    A sequence with drafts has a row for each and one more: row j is drawn as if the drafts before
    it were accepted, and it counts if they are. The options of the rows lie in arrays that are kept
    as long as the batch stays the same sequences in the same order; from step to step only
    positions change, and what the last tokens added to penalties. pool: captures the call where it
    comes again with the same arrays: replaying it takes a tenth of the host's time.

    row_token_ids: what each row of the last call drew, whether it counts or not; NO_TOKEN where
    nothing could be drawn.
    """

    __slots__ = ("_layouts", "_pool", "_states", "row_token_ids")

    def __init__(self, pool: GraphPool | None = None) -> None:
        self._pool = pool
        self._states: list[SequenceState] = []
        self._layouts: dict[tuple[int, ...], _Layout] = {}
        self.row_token_ids: list[int] = []

    def sample(
        self,
        logits: torch.Tensor,
        states: Sequence[SequenceState],
        masks: Sequence[bytes | None],
        widths: Sequence[int] | None = None,
        *,
        in_place: bool = False,
    ) -> list[SequenceOutput]:
        """Draw for each of `states`: widths[i] rows of logits [M, V] fp32, one without widths.

        masks: of each row, grammar bits (see core.grammar) or None. in_place: this tensor is
        written anew and handed over again for a later step. A sequence that can't go on gets an
        error, once the row that shows it is the first; its neighbours don't notice. logits are as
        they were afterwards.
        """
        if self._states != states:
            self._states = list(states)
            self._layouts.clear()
        key = () if widths is None else tuple(widths)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) == _MAX_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            layout = self._layouts[key] = _Layout(_rows(states, widths))
        batch = layout.batch(masks, logits.shape[1])
        drawn = self._draw(logits, layout, batch) if in_place else sample(logits, batch)
        token_ids: list[int] = drawn.token_ids.tolist()
        self.row_token_ids = token_ids
        plain = drawn.logprobs is None and min(token_ids, default=0) >= 0
        if plain and widths is None:
            return [SequenceOutput(s.seq_id, (t,)) for s, t in zip(states, token_ids, strict=True)]
        if widths is None:
            widths = [1] * len(states)
        if plain:
            return _plain_outputs(states, widths, token_ids)
        return _outputs(states, widths, token_ids, drawn)

    def release(self) -> None:
        """Forget the last batch's sequences."""
        self._states = []
        self._layouts.clear()

    def _draw(self, logits: torch.Tensor, layout: "_Layout", batch: SamplingBatch) -> SampledRows:
        """sample, captured when it comes a second time in a row with the same arrays."""
        drawn: SampledRows
        if self._pool is None or batch is not layout.plain:
            drawn = sample(logits, batch)
            return drawn
        if logits is not layout.logits:
            layout.logits, layout.captured = logits, None
            drawn = sample(logits, batch)
            return drawn
        if layout.captured is not None and layout.captured.is_current():
            layout.captured.replay()
        else:
            try:
                layout.captured = self._pool.capture(lambda: sample(logits, batch))
            except UnsupportedError:
                self._pool = None  # this device's sampling is no list of kernel calls
                drawn = sample(logits, batch)
                return drawn
        drawn = layout.captured.result
        return drawn


_MAX_LAYOUTS = 16
"""Of one batch, by how many drafts its sequences have: the last few come again and again."""


class _Layout:
    """The options of a batch's rows in arrays.

    plain: the batch without edits; captured, logits: the call over it, and what it draws from.
    """

    __slots__ = (
        "_bias",
        "_counts",
        "_depths",
        "_position",
        "_states",
        "captured",
        "logits",
        "plain",
    )

    def __init__(self, rows: Sequence[Row]) -> None:
        self._states = [state for state, _ in rows]
        depths = np.array([depth for _, depth in rows], np.int64)
        self._depths = depths if depths.any() else None
        metadata = _metadata(self._states)
        self._position = metadata.position.numpy()
        wanted = [-1 if s.params.logprobs is None else s.params.logprobs for s in self._states]
        top = max(wanted, default=-1)
        self.plain = SamplingBatch(
            metadata,
            num_logprobs=torch.tensor(wanted, dtype=torch.int64) if top >= 0 else None,
            max_logprobs=max(top, 0),
        )
        self.captured: CapturedStep | None = None
        self.logits: torch.Tensor | None = None
        self._bias, self._counts = BiasRows(rows), CountRows(rows)

    def batch(self, masks: Sequence[bytes | None], vocab_size: int) -> SamplingBatch:
        """The coming step's; `plain` itself where nothing edits its logits."""
        self._position[:] = [state.num_tokens for state in self._states]
        if self._depths is not None:
            self._position += self._depths
        bias, counts, mask = self._bias.update(), self._counts.update(), None
        if any(masks):
            mask = _token_mask(masks, vocab_size)
        if bias is None and counts is None and mask is None:
            return self.plain
        plain = self.plain
        return SamplingBatch(
            plain.metadata, bias, mask, counts, plain.num_logprobs, plain.max_logprobs
        )


def _rows(states: Sequence[SequenceState], widths: Sequence[int] | None) -> list[Row]:
    if widths is None:
        return [(state, 0) for state in states]
    pairs = zip(states, widths, strict=True)
    return [(state, depth) for state, width in pairs for depth in range(width)]


def _plain_outputs(
    states: Sequence[SequenceState], widths: Sequence[int], token_ids: list[int]
) -> list[SequenceOutput]:
    """Where each row drew a token, and nobody wants log probabilities."""
    outputs, row = [], 0
    for state, width in zip(states, widths, strict=True):
        if width == 1:
            outputs.append(SequenceOutput(state.seq_id, (token_ids[row],)))
        else:
            said = tuple(token_ids[row : row + width])
            said = said[: num_said(said, state.drafts[: width - 1])]
            outputs.append(SequenceOutput(state.seq_id, said, (), (), width - 1))
        row += width
    return outputs


def _outputs(
    states: Sequence[SequenceState],
    widths: Sequence[int],
    token_ids: list[int],
    drawn: SampledRows,
) -> list[SequenceOutput]:
    outputs: list[SequenceOutput] = []
    finite: list[bool] = drawn.finite.tolist()
    columns = None if drawn.logprobs is None else _columns(drawn.logprobs)
    row = 0
    for state, width in zip(states, widths, strict=True):
        said = tuple(token_ids[row : row + width])
        if width > 1:
            said = said[: num_said(said, state.drafts[: width - 1])]
            if said[-1] == NO_TOKEN and len(said) > 1:
                said = said[:-1]  # it is the next step's first row, which will say why
        top = state.params.logprobs
        entries: tuple[TokenLogprobs, ...] = ()
        if said[0] == NO_TOKEN:
            error = _NOTHING_ALLOWED if finite[row] else _NOT_FINITE
            outputs.append(SequenceOutput(state.seq_id, error=error))
        else:
            if columns is not None and top is not None:
                entries = tuple([_entry(*columns[row + j], top) for j in range(len(said))])
            outputs.append(SequenceOutput(state.seq_id, said, entries, (), width - 1))
        row += width
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
