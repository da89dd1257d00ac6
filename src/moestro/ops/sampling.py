"""From logits to tokens: edits, the draw, and log probabilities.

The order of a step follows vLLM: raw log probabilities; token bias and suppressed stop tokens;
grammar mask; repetition, frequency and presence penalties; temperature; min_p; top_k; top_p; draw.

Tokens are ranked by falling logit, ties by rising token id, everywhere: greedy takes the first of
that order, top_k its first k, top_p a prefix of it, and ranks count along it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moestro.ops.noise import gumbel_noise, log_number, needed_mass, noise_key, token_mass
from moestro.ops.registry import op
from moestro.ops.testing import Case

NO_TOKEN = -1
"""What sample_tokens returns for a row in which every token is forbidden."""

_NEVER = float("-inf")
_EXP_BLOCK = 8192
"""Below torch's parallel grain (32768), so that no thread count moves a vector loop's tail."""


@dataclass(frozen=True, slots=True)
class TokenBias:
    """Numbers added to single logits, -inf to forbid a token.

    rows, token_ids: [N] int64, each pair at most once; values: [N] fp32.
    """

    rows: torch.Tensor
    token_ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Grammar masks. rows: [R] int64; bits: [R, ceil(V / 8)] uint8, as core.grammar lays them."""

    rows: torch.Tensor
    bits: torch.Tensor


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The earlier tokens that penalties act on, one entry a distinct token of a row.

    rows, token_ids: [N] int64, each pair at most once; output_counts: [N] int64, occurrences in
    the output (0: in the prompt only). repetition, frequency, presence: [N] float64, the row's
    penalties.
    """

    rows: torch.Tensor
    token_ids: torch.Tensor
    output_counts: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """How each row is drawn; all [S].

    temperature float64, 0 = greedy; top_k int64, 0 = off; top_p float64, 1 = off; min_p float64,
    0 = off. The noise key: seed int64 (a 64-bit pattern), sample_index int64, position int64, the
    absolute position of the token to draw.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    sample_index: torch.Tensor
    position: torch.Tensor


@dataclass(frozen=True, slots=True)
class RankedLogprobs:
    """Column 0 is the token asked about, then the most likely ones, best first.

    token_ids: [M, 1 + n] int64; logprobs: [M, 1 + n] float64; ranks: [M, 1 + n] int64, 1-based.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor


def _bias_cases() -> Iterator[Case]:
    for rows, vocab, entries in ((3, 383, 7), (1, 5, 5), (2, 33, 0)):
        yield Case(
            f"{rows}x{vocab}, {entries} entries", torch.float32, _bias_of(rows, vocab, entries)
        )


@op(cases=_bias_cases, mutates=("logits",))
def apply_token_bias(logits: torch.Tensor, bias: TokenBias) -> None:
    """Add bias.values to single logits. logits: [S, V] fp32, finite or -inf; mutated.

    -inf forbids a token whatever else is added to it.
    """
    at = (bias.rows, bias.token_ids)
    logits[at] = logits[at] + bias.values


def _mask_cases() -> Iterator[Case]:
    for rows, vocab, masked in ((3, 383, 2), (1, 8, 1), (2, 9, 2), (2, 33, 0)):
        yield Case(f"{masked} of {rows}x{vocab}", torch.float32, _mask_of(rows, vocab, masked))


@op(cases=_mask_cases, mutates=("logits",))
def apply_token_mask(logits: torch.Tensor, mask: TokenMask) -> None:
    """Forbid (-inf) every token whose bit is 0. logits: [S, V] fp32; mutated."""
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = ((mask.bits[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits[mask.rows] = logits[mask.rows].masked_fill(~allowed, _NEVER)


def _penalty_cases() -> Iterator[Case]:
    for rows, vocab, entries in ((3, 383, 40), (1, 5, 5), (2, 33, 0)):
        name = f"{rows}x{vocab}, {entries} entries"
        yield Case(name, torch.float32, _counts_of(rows, vocab, entries))


@op(cases=_penalty_cases, mutates=("logits",))
def apply_penalties(logits: torch.Tensor, counts: TokenCounts) -> None:
    """Make earlier tokens less (or more) likely. logits: [S, V] fp32, finite or -inf; mutated.

    x > 0 is divided by repetition, other x multiplied; then frequency * count is subtracted, and
    presence where count > 0. In float64, rounded once to fp32; what was finite stays finite.
    Sources: Keskar et al. 2019, https://arxiv.org/abs/1909.05858; OpenAI's API reference.
    """
    at = (counts.rows, counts.token_ids)
    before = logits[at]
    x = before.double()
    x = torch.where(x > 0, x / counts.repetition, x * counts.repetition)
    x = x - counts.frequency * counts.output_counts
    x = x - counts.presence * (counts.output_counts > 0)
    limit = torch.finfo(torch.float32).max
    logits[at] = torch.where(before == _NEVER, before, x.clamp(-limit, limit).float())


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

    logits: [M, V] fp32, finite; token_ids: [M] int64; at most V top tokens are listed. log_softmax
    in float64. A rank is 1 + the tokens ahead in the order above, so the top ones are 1, 2, ... .
    """
    vocab = logits.shape[1]
    shape = (logits.shape[0], 1 + min(num_top, vocab))
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    ranks = torch.empty_like(ids)
    logprobs = torch.empty(shape, dtype=torch.float64, device=logits.device)
    for i, row in enumerate(logits):
        order = row.sort(descending=True, stable=True).indices
        token = token_ids[i]
        ids[i, 0], ids[i, 1:] = token, order[: shape[1] - 1]
        ranks[i, 0] = 1 + (order == token).nonzero()[0, 0]
        ranks[i, 1:] = torch.arange(1, shape[1], device=logits.device)
        y = row.double() - row.max().double()
        sums = torch.stack([block.exp().sum() for block in y.split(_EXP_BLOCK)])
        logprobs[i] = y[ids[i]] - sums.sum().log()
    return RankedLogprobs(ids, logprobs, ranks)


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


def _pairs(
    rows: int, vocab: int, entries: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct (row, token) pairs."""
    flat = torch.randperm(rows * vocab, generator=generator)[:entries]
    return flat // vocab, flat % vocab


def _bias_of(rows: int, vocab: int, entries: int) -> Any:
    def make(generator: torch.Generator) -> dict[str, Any]:
        at, ids = _pairs(rows, vocab, entries, generator)
        values = torch.randn(entries, generator=generator) * 10
        values[::3] = _NEVER
        logits = torch.randn((rows, vocab), generator=generator)
        return {"logits": logits, "bias": TokenBias(at, ids, values)}

    return make


def _mask_of(rows: int, vocab: int, masked: int) -> Any:
    def make(generator: torch.Generator) -> dict[str, Any]:
        bits = torch.randint(0, 256, (masked, -(-vocab // 8)), generator=generator)
        at = torch.randperm(rows, generator=generator)[:masked]
        logits = torch.randn((rows, vocab), generator=generator)
        return {"logits": logits, "mask": TokenMask(at, bits.to(torch.uint8))}

    return make


def _counts_of(rows: int, vocab: int, entries: int) -> Any:
    def make(generator: torch.Generator) -> dict[str, Any]:
        at, ids = _pairs(rows, vocab, entries, generator)
        logits = torch.randn((rows, vocab), generator=generator) * 8
        logits[torch.rand((rows, vocab), generator=generator) < 0.1] = _NEVER
        penalties = torch.rand((3, rows), generator=generator, dtype=torch.float64) + 0.5
        return {
            "logits": logits,
            "counts": TokenCounts(
                at, ids, torch.randint(0, 5, (entries,), generator=generator), *penalties[:, at]
            ),
        }

    return make


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
