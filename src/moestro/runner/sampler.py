"""From logits to tokens and log probabilities, for sequences with options of their own."""

from collections.abc import Sequence

import numpy as np
import torch

from moestro.core.step import SequenceOutput, TokenLogprobs
from moestro.ops.sampling import (
    NO_TOKEN,
    SamplingMetadata,
    TokenBias,
    TokenCounts,
    TokenMask,
    apply_penalties,
    apply_token_bias,
    apply_token_mask,
    sample_tokens,
    token_logprobs,
)
from moestro.runner.sequence_state import SequenceState

_NOT_FINITE = (
    "the model produced logits that are not finite (NaN or infinity) for this sequence; its "
    "weights may be damaged or too large for the compute dtype."
)
_NOTHING_ALLOWED = (
    "no token is allowed here: grammar, logit_bias and min_tokens together forbid every one."
)


def sample(
    logits: torch.Tensor,
    states: Sequence[SequenceState],
    masks: Sequence[bytes | None],
) -> list[SequenceOutput]:
    """Draw the next token of each sequence; row i of logits [S, V] fp32 belongs to states[i].

    logits are overwritten. masks: grammar bits (see core.grammar) or None. A sequence that can't
    go on gets an error; its neighbours don't notice.
    """
    finite = finite_rows(logits)
    if not all(finite):
        logits[torch.tensor(finite).logical_not()] = 0.0
    asked = [i for i, s in enumerate(states) if s.params.logprobs is not None and finite[i]]
    raw = logits[asked] if asked else logits[:0]
    _edit(logits, states, masks)
    token_ids: list[int] = sample_tokens(logits, _metadata(states)).tolist()
    asked_token_ids = [token_ids[i] for i in asked]
    wanted = [states[i].params.logprobs or 0 for i in asked]
    logprobs = dict(zip(asked, score(raw, asked_token_ids, wanted), strict=True))
    outputs = []
    for i, (state, token_id) in enumerate(zip(states, token_ids, strict=True)):
        if not finite[i] or token_id == NO_TOKEN:
            error = _NOTHING_ALLOWED if finite[i] else _NOT_FINITE
            outputs.append(SequenceOutput(state.seq_id, error=error))
        else:
            of_token = (logprobs[i],) if i in logprobs else ()
            outputs.append(SequenceOutput(state.seq_id, (token_id,), of_token))
    return outputs


def score(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Log probabilities of one token a row, with num_top[i] of the most likely ones.

    logits: [M, V] fp32, finite. NO_TOKEN scores as token 0.
    """
    if not token_ids:
        return []
    asked = torch.tensor(token_ids).clamp(min=0)
    ranked = token_logprobs(logits, asked, max(num_top))
    columns = zip(
        ranked.token_ids.tolist(), ranked.logprobs.tolist(), ranked.ranks.tolist(), strict=True
    )
    return [
        TokenLogprobs(tuple(ids[: 1 + n]), tuple(values[: 1 + n]), tuple(ranks[: 1 + n]))
        for (ids, values, ranks), n in zip(columns, num_top, strict=True)
    ]


def score_prompt(
    logits: torch.Tensor, state: SequenceState, start: int
) -> tuple[tuple[TokenLogprobs, ...], str | None]:
    """Score the prompt tokens after positions start, start + 1, ...; one row of logits each.

    Returns the entries, or none and an error when the logits are not finite.
    """
    if not all(finite_rows(logits)):
        return (), _NOT_FINITE
    token_ids = state.token_ids[start + 1 : start + 1 + len(logits)].tolist()
    num_top = state.params.prompt_logprobs or 0
    return tuple(score(logits, token_ids, [num_top] * len(token_ids))), None


def finite_rows(logits: torch.Tensor) -> list[bool]:
    """Whether all of a row is finite: minimum and maximum carry NaN along."""
    finite: list[bool] = (logits.amin(1).isfinite() & logits.amax(1).isfinite()).tolist()
    return finite


def _edit(
    logits: torch.Tensor, states: Sequence[SequenceState], masks: Sequence[bytes | None]
) -> None:
    """Apply what forbids or shifts tokens, in the order of ops.sampling."""
    if (bias := _bias(states)) is not None:
        apply_token_bias(logits, bias)
    if (mask := _mask(masks, logits.shape[1])) is not None:
        apply_token_mask(logits, mask)
    if (counts := _counts(states)) is not None:
        apply_penalties(logits, counts)


def _bias(states: Sequence[SequenceState]) -> TokenBias | None:
    """logit_bias and the stop tokens that min_tokens still suppresses."""
    given = [(row, *state.token_bias()) for row, state in enumerate(states)]
    given = [entry for entry in given if len(entry[1])]
    if not given:
        return None
    sizes = torch.tensor([len(token_ids) for _, token_ids, _ in given])
    return TokenBias(
        rows=torch.tensor([row for row, _, _ in given]).repeat_interleave(sizes),
        token_ids=torch.from_numpy(np.concatenate([token_ids for _, token_ids, _ in given])),
        values=torch.from_numpy(np.concatenate([values for _, _, values in given])),
    )


def _mask(masks: Sequence[bytes | None], vocab_size: int) -> TokenMask | None:
    given = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
    if not given:
        return None
    width = -(-vocab_size // 8)
    for _, mask in given:
        if len(mask) != width:
            raise ValueError(
                f"a grammar mask holds {len(mask)} bytes; {vocab_size} tokens need {width}."
            )
    bits = np.frombuffer(bytearray(b"".join(mask for _, mask in given)), np.uint8)
    rows = torch.tensor([row for row, _ in given])
    return TokenMask(rows, torch.from_numpy(bits).view(len(given), width))


def _counts(states: Sequence[SequenceState]) -> TokenCounts | None:
    given = [(row, s, s.tally) for row, s in enumerate(states) if s.tally is not None]
    if not given:
        return None
    sizes = torch.tensor([len(tally.token_ids) for _, _, tally in given])
    params = [
        (s.params.repetition_penalty, s.params.frequency_penalty, s.params.presence_penalty)
        for _, s, _ in given
    ]
    repetition, frequency, presence = torch.tensor(params, dtype=torch.float64).T
    return TokenCounts(
        rows=torch.tensor([row for row, _, _ in given]).repeat_interleave(sizes),
        token_ids=torch.from_numpy(np.concatenate([tally.token_ids for _, _, tally in given])),
        output_counts=torch.from_numpy(np.concatenate([tally.counts for _, _, tally in given])),
        repetition=repetition.repeat_interleave(sizes),
        frequency=frequency.repeat_interleave(sizes),
        presence=presence.repeat_interleave(sizes),
    )


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
