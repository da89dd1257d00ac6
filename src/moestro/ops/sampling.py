"""From logits to tokens: edits, the draw, and log probabilities.

The order of a step follows vLLM: raw log probabilities; token bias and suppressed stop tokens;
grammar mask; repetition, frequency and presence penalties; temperature; min_p; top_k; top_p; draw.

Tokens are ranked by falling logit, ties by rising token id, everywhere: greedy takes the first of
that order, top_k its first k, top_p a prefix of it, and ranks count along it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from moestro.ops.logit_edits import (
    TokenBias,
    TokenCounts,
    TokenMask,
    apply_penalties,
    apply_token_bias,
    apply_token_mask,
    check_vectors,
)
from moestro.ops.noise import gumbel_noise, log_number, needed_mass, noise_key, token_mass
from moestro.ops.registry import op
from moestro.ops.testing import Case

NO_TOKEN = -1
"""What sample_tokens returns for a row in which every token is forbidden."""

_NEVER = float("-inf")
_EXP_BLOCK = 8192
"""Below torch's parallel grain (32768), so that no thread count moves a vector loop's tail."""


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """How each row is drawn; all [S].

    temperature float64, 0 = greedy; top_k int64, 0 = off; top_p float64, 1 = off; min_p float64,
    0 = off. The noise key: seed int64 (a 64-bit pattern), sample_index int64, position int64, the
    absolute position of the token to draw. Raises ValueError for other types, sizes or strides.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    sample_index: torch.Tensor
    position: torch.Tensor

    def __post_init__(self) -> None:
        rows = len(self.temperature)
        doubles = {"temperature": self.temperature, "top_p": self.top_p, "min_p": self.min_p}
        check_vectors(rows, torch.float64, **doubles)
        check_vectors(
            rows,
            torch.int64,
            top_k=self.top_k,
            seed=self.seed,
            sample_index=self.sample_index,
            position=self.position,
        )


@dataclass(frozen=True, slots=True)
class RankedLogprobs:
    """Column 0 is the token asked about, then the most likely ones, best first.

    token_ids: [M, 1 + n] int64; logprobs: [M, 1 + n] float64; ranks: [M, 1 + n] int64, 1-based.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What a step asks of each row. None: no row has that. Raises ValueError where parts differ.

    num_logprobs: [S] int64, the most likely tokens to list, or -1 for no log probabilities;
    max_logprobs: their largest number, the width of the result.
    """

    metadata: SamplingMetadata
    bias: TokenBias | None = None
    mask: TokenMask | None = None
    counts: TokenCounts | None = None
    num_logprobs: torch.Tensor | None = None
    max_logprobs: int = 0

    def __post_init__(self) -> None:
        rows = len(self.metadata.temperature)
        if self.bias is not None:
            check_vectors(rows, torch.int64, bias_starts=self.bias.starts)
        if self.mask is not None:
            check_vectors(rows, torch.int64, mask_rows=self.mask.rows)
        if self.counts is not None:
            check_vectors(rows, torch.int64, count_starts=self.counts.starts)
        if self.num_logprobs is not None:
            check_vectors(rows, torch.int64, num_logprobs=self.num_logprobs)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """token_ids: [S] int64; finite: [S] bool; logprobs: [S, 1 + max_logprobs], None if unasked.

    Entries of logprobs that a row did not ask for, or can't have: token -1, NaN, rank 0.
    """

    token_ids: torch.Tensor
    finite: torch.Tensor
    logprobs: RankedLogprobs | None


def _sample_cases() -> Iterator[Case]:
    for vocab in (1, 7, 383, 4099):
        yield Case(f"every option, V={vocab}", torch.float32, _draws_of(vocab, _OPTIONS))
        yield Case(f"equal logits, V={vocab}", torch.float32, _draws_of(vocab, _OPTIONS, flat=True))
    yield Case("no row", torch.float32, _draws_of(33, ()))


@op(cases=_sample_cases)
def sample_tokens(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """Draw one token a row. logits: [S, V] fp32, finite or -inf. Returns [S] int64.

    Greedy takes the first token of the order above. Otherwise y = (logit - the row's largest) /
    temperature in float64; min_p keeps y >= log(min_p), which is p >= min_p * p_max; top_k keeps
    the first k; top_p keeps the shortest prefix of what is left that holds its share, in the
    integer masses of ops.noise; the draw is the largest y + gumbel noise of the token, equal sums
    to the lowest id. The noise belongs to the token id, so any body may skip the tokens that can't
    win. NO_TOKEN for a row that is all -inf. Source of the draw: Gumbel-max, Maddison et al. 2014,
    https://arxiv.org/abs/1411.0030.
    """
    out = torch.full((logits.shape[0],), NO_TOKEN, dtype=torch.int64, device=logits.device)
    for i, row in enumerate(logits):
        top_k, top_p = int(metadata.top_k[i]), float(metadata.top_p[i])
        ids = row.sort(descending=True, stable=True).indices
        ids = ids[: int((row > _NEVER).sum())]
        if not len(ids):
            continue
        if metadata.temperature[i] == 0:
            out[i] = ids[0]
            continue
        x = row[ids].double()
        y = (x - x[0]) / metadata.temperature[i].double()
        kept = min(top_k or len(ids), len(ids))
        if metadata.min_p[i] > 0:
            kept = min(kept, int((y >= log_number(float(metadata.min_p[i]))).sum()))
        if top_p < 1:
            mass = token_mass(y[:kept])
            cumulative = mass.cumsum(0)
            before = cumulative - mass
            kept = int((before < needed_mass(top_p, int(cumulative[-1]))).sum())
        key = noise_key(
            int(metadata.seed[i]), int(metadata.sample_index[i]), int(metadata.position[i])
        )
        score = y[:kept] + gumbel_noise(ids[:kept], key)
        out[i] = ids[:kept][score == score.max()].min()
    return out


def _logprob_cases() -> Iterator[Case]:
    for rows, vocab, top in ((3, 383, 5), (1, 4099, 20), (2, 3, 5), (2, 33, 0), (0, 33, 2)):
        name = f"{rows}x{vocab}, top {top}"
        yield Case(name, torch.float32, _logprobs_of(rows, vocab, top, flat=False))
    yield Case("equal logits", torch.float32, _logprobs_of(2, 129, 20, flat=True))


@op(cases=_logprob_cases)
def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> RankedLogprobs:
    """Log probabilities of one token a row and of the num_top most likely ones.

    logits: [M, V] fp32; token_ids: [M] int64; at most V top tokens are listed. log_softmax in
    float64. A rank is 1 + the tokens ahead in the order above, so the top ones are 1, 2, ... .
    A row that is not finite gets NaN, ranks 0 and no top tokens (-1).
    """
    vocab = logits.shape[1]
    shape = (logits.shape[0], 1 + min(num_top, vocab))
    ids, logprobs, ranks = _no_logprobs(shape, logits.device)
    ids[:, 0] = token_ids
    for i, row in enumerate(logits):
        if not row.isfinite().all():
            continue
        order = row.sort(descending=True, stable=True).indices
        token = token_ids[i]
        ids[i, 1:] = order[: shape[1] - 1]
        ranks[i, 0] = 1 + (order == token).nonzero()[0, 0]
        ranks[i, 1:] = torch.arange(1, shape[1], device=logits.device)
        y = row.double() - row.max().double()
        sums = torch.stack([block.exp().sum() for block in y.split(_EXP_BLOCK)])
        logprobs[i] = y[ids[i]] - sums.sum().log()
    return RankedLogprobs(ids, logprobs, ranks)


def _no_logprobs(
    shape: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.full(shape, NO_TOKEN, dtype=torch.int64, device=device)
    return (
        ids,
        torch.full(shape, torch.nan, dtype=torch.float64, device=device),
        torch.zeros_like(ids),
    )


def _step_cases() -> Iterator[Case]:
    for vocab in (1, 9, 383, 4099):
        for edited, num_top in ((False, 0), (True, 0), (False, 3), (True, 20)):
            name = f"V={vocab}, {'edited' if edited else 'plain'}, {num_top} logprobs"
            yield Case(name, torch.float32, _steps_of(vocab, edited, num_top))


@op(cases=_step_cases)
def sample(logits: torch.Tensor, batch: SamplingBatch) -> SampledRows:
    """All of a step's sampling: log probabilities, edits, draw. logits: [S, V] fp32.

    finite says whether all of a row's logits are, as they come; a row whose are not, or whose
    tokens are all forbidden, gets NO_TOKEN and no log probabilities, and its neighbours don't
    notice. Log probabilities are those of token_logprobs on the logits as they come, of the token
    drawn. Then ops.logit_edits: bias, mask, penalties; then sample_tokens. Source: the order of
    vLLM's sampler. logits are the same afterwards, but are no one else's to read meanwhile.
    """
    finite = logits.isfinite().all(1)
    edited = logits.clone()
    edited[~finite] = 0.0
    if batch.bias is not None:
        apply_token_bias(edited, batch.bias)
    if batch.mask is not None:
        apply_token_mask(edited, batch.mask)
    if batch.counts is not None:
        apply_penalties(edited, batch.counts)
    token_ids = sample_tokens.reference(edited, batch.metadata)
    token_ids[~finite] = NO_TOKEN
    if batch.num_logprobs is None:
        return SampledRows(token_ids, finite, None)
    shape = (len(logits), 1 + batch.max_logprobs)
    ids, logprobs, ranks = _no_logprobs(shape, logits.device)
    asked = (batch.num_logprobs >= 0) & (token_ids >= 0)
    for i in asked.nonzero().flatten().tolist():
        top = int(batch.num_logprobs[i])
        ranked = token_logprobs.reference(logits[i : i + 1], token_ids[i : i + 1], top)
        columns = slice(0, ranked.token_ids.shape[1])
        ids[i, columns] = ranked.token_ids[0]
        logprobs[i, columns] = ranked.logprobs[0]
        ranks[i, columns] = ranked.ranks[0]
    return SampledRows(token_ids, finite, RankedLogprobs(ids, logprobs, ranks))


_OPTIONS = (  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 20, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.05),
    (0.8, 20, 0.8, 0.0),
    (2.0, 3, 0.999, 0.001),
    (1e-9, 0, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 10**6, 0.99, 1.0),
)


def _draws_of(vocab: int, options: tuple[tuple[float, ...], ...], flat: bool = False) -> Any:
    def make(generator: torch.Generator) -> dict[str, Any]:
        rows = len(options)
        logits = torch.randn((rows, vocab), generator=generator) * 4
        if flat:
            logits = logits.round().clamp(0, 1)
        logits[torch.rand((rows, vocab), generator=generator) < 0.1] = _NEVER
        columns = tuple(zip(*options, strict=True)) if options else ((),) * 4
        low, high = -(2**63), 2**63 - 1
        return {
            "logits": logits,
            "metadata": SamplingMetadata(
                temperature=torch.tensor(columns[0], dtype=torch.float64),
                top_k=torch.tensor(columns[1], dtype=torch.int64),
                top_p=torch.tensor(columns[2], dtype=torch.float64),
                min_p=torch.tensor(columns[3], dtype=torch.float64),
                seed=torch.randint(low, high, (rows,), generator=generator),
                sample_index=torch.randint(0, 4, (rows,), generator=generator),
                position=torch.randint(0, 2**20, (rows,), generator=generator),
            ),
        }

    return make


def _steps_of(vocab: int, edited: bool, num_top: int) -> Any:
    def make(generator: torch.Generator) -> dict[str, Any]:
        drawn = _draws_of(vocab, _OPTIONS)(generator)
        rows = len(_OPTIONS)
        logits = torch.randn((rows, vocab), generator=generator) * 4
        logits[3, vocab // 2] = float("nan")
        logits[6, 0] = _NEVER
        wanted = torch.arange(rows) % (num_top + 2) - 1 if num_top else None
        batch = SamplingBatch(drawn["metadata"], num_logprobs=wanted, max_logprobs=num_top)
        return {"logits": logits, "batch": _edited(batch, vocab, generator) if edited else batch}

    return make


def _edited(batch: "SamplingBatch", vocab: int, generator: torch.Generator) -> "SamplingBatch":
    """With every edit, each on some of the rows."""
    rows = len(batch.metadata.temperature)
    row = torch.arange(rows)
    room = min(vocab, 40)
    starts = row * room
    ids = torch.cat([torch.randperm(vocab, generator=generator)[:room] for _ in range(2 * rows)])
    biases, counted = ids.split(rows * room)
    values = torch.randn(rows * room, generator=generator) * 10
    values[::3] = _NEVER
    bits = torch.randint(0, 256, (2, -(-vocab // 8)), generator=generator).to(torch.uint8)
    penalties = torch.rand((3, rows), generator=generator, dtype=torch.float64) + 0.5
    seen = torch.randint(0, 5, (rows * room,), generator=generator)
    return replace(
        batch,
        bias=TokenBias(starts, (row % 3 == 1) * (room - 1), biases, values),
        mask=TokenMask(row % 4 - 2, bits),
        counts=TokenCounts(starts, (row % 2) * (room - row % room), counted, seen, *penalties),
    )


def _logprobs_of(rows: int, vocab: int, top: int, flat: bool) -> Any:
    def make(generator: torch.Generator) -> dict[str, Any]:
        logits = torch.randn((rows, vocab), generator=generator) * 4
        token_ids = torch.randint(0, vocab, (rows,), generator=generator)
        return {
            "logits": torch.zeros_like(logits) if flat else logits,
            "token_ids": token_ids,
            "num_top": top,
        }

    return make
