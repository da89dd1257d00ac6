"""Sampling bodies in numpy: one thread, a row at a time, so a row's bits depend on the row alone.

They give exactly the reference's tokens and spare its cost: noise in full for the few tokens that
can win, and sorting for the few that top_k or top_p can keep.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from moestro.ops import noise, sampling
from moestro.ops.registry import implements
from moestro.ops.sampling import NO_TOKEN, RankedLogprobs, SamplingMetadata, TokenMask

_BLOCK = 8192
"""Tokens hashed at a time: the scratch arrays stay in the L2 cache."""
_STEPS = np.arange(1, _BLOCK + 1, dtype=np.uint64) * np.uint64(noise.GOLDEN)
_WORD = (1 << 64) - 1
_MARGIN = np.float32(1e-3)
"""Far above the fp32 error of an estimated score that can win (below 100 in size)."""
_GROUP = 64
"""Tokens a group when looking for the largest logits."""
_FEW = 512
"""So many tokens get their noise in full straight away."""
_BUCKETS = 128.0
"""top_p's histogram: buckets per unit of y."""


@implements(sampling.sample_tokens, devices=("cpu",), invariant=True)
def sample_tokens(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    rows = logits.numpy()
    columns = zip(
        metadata.temperature.tolist(),
        metadata.top_k.tolist(),
        metadata.top_p.tolist(),
        metadata.min_p.tolist(),
        metadata.seed.tolist(),
        metadata.sample_index.tolist(),
        metadata.position.tolist(),
        strict=True,
    )
    best = rows.argmax(axis=1)
    best[rows[np.arange(len(rows)), best] == -np.inf] = NO_TOKEN
    drawn: list[_Contest] = []
    with np.errstate(over="ignore"):  # tiny temperatures: y becomes -inf, as it should
        for i, (temperature, top_k, top_p, min_p, seed, index, position) in enumerate(columns):
            if temperature != 0.0 and best[i] != NO_TOKEN:
                key = noise.noise_key(seed, index, position)
                ids = _candidates(rows[i], temperature, top_k, top_p, min_p)
                if ids is None and rows.shape[1] <= _FEW:
                    ids = np.arange(rows.shape[1])
                elif ids is None or len(ids) > _FEW:
                    ids = _contenders(rows[i], ids, temperature, key)
                drawn.append(_Contest(i, rows[i, best[i]], temperature, key, ids))
        if drawn:
            best[[contest.row for contest in drawn]] = _winners(rows, drawn)
    return torch.from_numpy(best)


@implements(sampling.token_logprobs, devices=("cpu",), invariant=True)
def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> RankedLogprobs:
    rows = logits.numpy()
    top = min(num_top, rows.shape[1])
    ids = np.empty((len(rows), 1 + top), np.int64)
    ranks = np.empty_like(ids)
    logprobs = np.empty(ids.shape, np.float64)
    ranks[:, 1:] = np.arange(1, 1 + top)
    for i, token in enumerate(token_ids.tolist()):
        row = rows[i]
        ids[i, 0] = token
        ids[i, 1:] = _first_of_order(row, top)
        at_token = row[token]
        ahead = np.count_nonzero(row > at_token) + np.count_nonzero(row[:token] == at_token)
        ranks[i, 0] = 1 + ahead
        largest = float(row.max())
        y = row.astype(np.float64)
        y -= largest
        total = math.log(float(np.exp(y, out=y).sum()))
        logprobs[i] = row[ids[i]].astype(np.float64) - largest - total
    return RankedLogprobs(*map(torch.from_numpy, (ids, logprobs, ranks)))


@implements(sampling.apply_token_mask, devices=("cpu",), invariant=True)
def apply_token_mask(logits: torch.Tensor, mask: TokenMask) -> None:
    rows = logits.numpy()
    for row, bits in zip(mask.rows.tolist(), mask.bits.numpy(), strict=True):
        allowed = np.unpackbits(bits, count=rows.shape[1], bitorder="little").view(bool)
        rows[row][~allowed] = -np.inf


for _op in (sampling.apply_token_bias, sampling.apply_penalties):
    _op.allow_reference("cpu", invariant=True)  # a few entries a row, IEEE operations only


class _Contest(NamedTuple):
    """The ids among which a row's token is drawn, and what their scores need."""

    row: int
    largest: np.float32
    temperature: float
    key: int
    ids: np.ndarray


def _winners(rows: np.ndarray, contests: list[_Contest]) -> np.ndarray:
    """The best score's id of each contest, equal scores going to the lowest id; int64.

    All contests at once: an entry's score takes IEEE operations on that entry alone.
    """
    sizes = np.array([len(c.ids) for c in contests], np.int64)
    ids = np.concatenate([c.ids for c in contests])
    x = np.concatenate([rows[c.row, c.ids] for c in contests])
    largest = np.repeat([c.largest for c in contests], sizes)
    temperature = np.repeat([c.temperature for c in contests], sizes)
    keys = np.repeat(np.array([c.key for c in contests], np.uint64), sizes)
    score = _scaled(x, largest, temperature) + _gumbel(ids, keys)
    starts: np.ndarray = np.cumsum(sizes) - sizes
    best = np.repeat(np.maximum.reduceat(score, starts), sizes)
    ids[score != best] = rows.shape[1]
    winners: np.ndarray = np.minimum.reduceat(ids, starts)
    return winners


def _scaled(
    x: np.ndarray, largest: np.float32 | np.ndarray, temperature: float | np.ndarray
) -> np.ndarray:
    """y of the op, [*] float64."""
    y = x.astype(np.float64)
    y -= largest  # fp32, widened exactly
    y /= temperature
    return y


def _contenders(
    row: np.ndarray, ids: np.ndarray | None, temperature: float, key: int
) -> np.ndarray:
    """Those of ids (None: all) that can win: a few, found by an estimate from above.

    -log(-log u) <= -log(1 - u) for every u, so y - log(1 - u) in fp32, plus the margin, is never
    below the score. The best estimate's own score is a bar that the rest must reach.
    """
    largest = row.max()
    inverse = np.float32(1.0 / max(temperature, 1e-30))
    estimate = np.empty(len(row) if ids is None else len(ids), np.float32)
    for begin in range(0, len(estimate), _BLOCK):
        block = slice(begin, min(begin + _BLOCK, len(estimate)))
        if ids is None:
            bits = _hash(_STEPS[: block.stop - begin], key + begin * noise.GOLDEN)
            x = row[block]
        else:
            bits = _hash(_steps(ids[block]), key)
            x = row[ids[block]]
        estimate[block] = (x - largest) * inverse - _log_gap(bits)
    first = np.array([estimate.argmax()])
    if ids is not None:
        first = ids[first]
    bar = _scaled(row[first], largest, temperature) + _gumbel(first, key)
    reached = np.flatnonzero(estimate >= bar[0].astype(np.float32) - _MARGIN)
    return reached if ids is None else ids[reached]


def _candidates(
    row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray | None:
    """Ids that top_k, top_p and min_p leave; None when they are all off."""
    ids = None
    if 0 < top_k < len(row):
        ids = _first_of_order(row, top_k)
        ids = ids[row[ids] > -np.inf]
    if min_p == 0.0 and top_p == 1.0:
        return ids
    y = _scaled(row if ids is None else row[ids], row.max(), temperature)
    if min_p > 0.0:
        kept = np.flatnonzero(y >= noise.log_number(min_p))
        ids, y = kept if ids is None else ids[kept], y[kept]
    return ids if top_p == 1.0 else _prefix(row, ids, y, top_p)


def _prefix(row: np.ndarray, ids: np.ndarray | None, y: np.ndarray, top_p: float) -> np.ndarray:
    """The first of ids (None: all) in order that hold top_p of their mass.

    Among many, a histogram over y finds the narrow range in which the prefix ends; only that is
    sorted, equal logits by rising id. Overwrites y.
    """
    np.maximum(y, noise.MIN_EXPONENT, out=y)  # no mass there: never kept
    surely, need = np.empty(0, np.int64), 0
    if len(y) <= _FEW:
        at = np.arange(len(y))
    else:
        held = _mass_by_bucket(y).cumsum()
        need = noise.needed_mass(top_p, int(held[-1]))
        last = int(np.searchsorted(held, need))
        need -= int(held[last - 1]) if last else 0
        surely = np.flatnonzero(y > last / -_BUCKETS)
        at = np.flatnonzero((y <= last / -_BUCKETS) & (y > (last + 1) / -_BUCKETS))
    x = row[at if ids is None else ids[at]]
    at = at[np.argsort(-x, kind="stable")]
    mass = noise.scaled_exp(y[at]).astype(np.int64)
    cumulative = mass.cumsum()
    need = need or noise.needed_mass(top_p, int(cumulative[-1]))
    at = np.concatenate((surely, at[: np.count_nonzero(cumulative - mass < need)]))
    return at if ids is None else ids[at]


def _mass_by_bucket(y: np.ndarray) -> np.ndarray:
    """[buckets] int64 histogram of the mass, bucket b holding b <= -y * _BUCKETS < b + 1.

    Exact: halves of a mass stay below 2^23 and their float64 totals below 2^53.
    """
    half = noise.MASS_BITS // 2
    size = int(-noise.MIN_EXPONENT * _BUCKETS) + 1
    upper, lower = np.zeros(size), np.zeros(size)
    for begin in range(0, len(y), _BLOCK):
        part = y[begin : begin + _BLOCK]
        bucket = (part * -_BUCKETS).astype(np.int64)
        mass = noise.scaled_exp(part).astype(np.int64)
        upper += np.bincount(bucket, mass >> half, size)
        lower += np.bincount(bucket, mass & ((1 << half) - 1), size)
    return (upper.astype(np.int64) << half) + lower.astype(np.int64)


def _first_of_order(row: np.ndarray, count: int) -> np.ndarray:
    """The count first ids by (falling logit, rising id).

    The count-th largest of the maxima of disjoint groups is no larger than that of the row: all
    that is wanted lies at or above it, and little else.
    """
    groups = len(row) // _GROUP
    if 0 < count <= groups:
        peaks = row[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
    else:
        peaks = row
    at = len(peaks) - max(count, 1)
    bound = np.partition(peaks, at)[at]
    above = np.flatnonzero(row > bound)
    equal = np.flatnonzero(row == bound)[:count]
    ids = np.concatenate((above, equal))
    return ids[np.argsort(-row[ids], kind="stable")[:count]]


def _gumbel(ids: np.ndarray, key: int | np.ndarray) -> np.ndarray:
    """noise.gumbel_noise on an array of int64 ids."""
    bits = _hash(_steps(ids), key)
    uniform = np.maximum((bits >> np.uint64(11)).astype(np.float64), 0.5) * 2.0**-53
    return -_log(-_log(uniform))


def _log(x: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(x)
    return noise.log_of_parts(mantissa, exponent.astype(np.float64))


def _steps(ids: np.ndarray) -> np.ndarray:
    return (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(noise.GOLDEN)


def _hash(steps: np.ndarray, key: int | np.ndarray) -> np.ndarray:
    """The finaliser of ops.noise on key + steps; [*] uint64, a new array."""
    z: np.ndarray = steps + (key if isinstance(key, np.ndarray) else np.uint64(key & _WORD))
    shifted = z >> np.uint64(30)
    z ^= shifted
    z *= np.uint64(noise.MULTIPLIER_1)
    z ^= np.right_shift(z, np.uint64(27), out=shifted)
    z *= np.uint64(noise.MULTIPLIER_2)
    z ^= np.right_shift(z, np.uint64(31), out=shifted)
    return z


def _log_gap(bits: np.ndarray) -> np.ndarray:
    """fp32 log(1 - u), [*]; log 1 for the smallest u."""
    gap = np.uint64(1 << 53) - (bits >> np.uint64(11))
    return np.log(gap.view(np.int64).astype(np.float32)) - np.float32(53 * math.log(2))
