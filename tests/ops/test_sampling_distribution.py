"""Chi-square of 100,000 draws for each option against probabilities computed in plain float64.

Where the reference serves, which sorts a row at a time, fewer.
"""

import math

import numpy as np
import pytest
import torch

import moestro.backends.cpu  # noqa: F401 -- registers the bodies
from moestro import ops
from moestro.backends.cpu import library

DRAWS = 100_000 if library.has_native() else 5_000
full_vocabulary = pytest.mark.skipif(not library.has_native(), reason="hours of sorting")
LOGITS = [2.0, 1.5, 0.3, 0.0, 0.0, -0.4, -1.0, -1.7, -2.5, -4.0]


def draw(logits: list[float], count: int = DRAWS, varied: str = "position", **options: float):
    """Tokens drawn with one part of the noise key running from 0 to count."""
    row = torch.tensor(logits).expand(count, -1)
    return ops.sample_tokens(row, columns(count, varied, **options)).numpy()


def columns(count: int, varied: str = "position", **options: float) -> ops.SamplingMetadata:
    fields = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    fields |= {"seed": 2024, "sample_index": 0, "position": 0} | options
    made = {}
    for name, value in fields.items():
        real = name in ("temperature", "top_p", "min_p")
        made[name] = torch.full((count,), value, dtype=torch.float64 if real else torch.int64)
    made[varied] = torch.arange(count)
    return ops.SamplingMetadata(**made)


def probabilities(
    logits: list[float],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """What each option is defined to leave, step by step."""
    p = np.exp((np.float32(logits).astype(np.float64) - max(logits)) / temperature)
    p[p < min_p * p.max()] = 0
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    mass = 0.0
    for token in order:
        if mass >= top_p:
            p[token] = 0
        mass += p[token]
    return p / p.sum()


def assert_follows(tokens: np.ndarray, p: np.ndarray) -> None:
    counts = np.bincount(tokens, minlength=len(p))
    assert counts[p == 0].sum() == 0
    expected = p[p > 0] * len(tokens)
    chi_square = float(((counts[p > 0] - expected) ** 2 / expected).sum())
    degrees = max(len(expected) - 1, 1)
    spread = 2 / (9 * degrees)
    assert chi_square < degrees * (1 - spread + 4.0 * math.sqrt(spread)) ** 3, counts


def test_plain_sampling():
    assert_follows(draw(LOGITS), probabilities(LOGITS))


@pytest.mark.parametrize("varied", ["seed", "sample_index"])
def test_plain_sampling_over_other_parts_of_the_key(varied: str):
    assert_follows(draw(LOGITS, 20_000, varied=varied), probabilities(LOGITS))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.4, "top_k": 7, "top_p": 0.85, "min_p": 0.02},
    ],
    ids=str,
)
def test_each_option(options: dict[str, float]):
    assert_follows(draw(LOGITS, **options), probabilities(LOGITS, **options))


def test_penalties_bias_and_mask():
    """All edits in the one call that samples a step; every row reads the same segment."""
    ids, counts = torch.tensor([0, 1, 2, 5]), torch.tensor([2, 0, 1, 1])
    zeros = torch.zeros(DRAWS, dtype=torch.int64)
    batch = ops.SamplingBatch(
        columns(DRAWS),
        ops.TokenBias(zeros, zeros + 1, torch.tensor([9]), torch.tensor([5.0])),
        ops.TokenMask(zeros, torch.tensor([[0b11110111, 0b11]], dtype=torch.uint8)),
        ops.TokenCounts(
            zeros, zeros + 4, ids, counts, *((zeros + v).double() for v in (1.2, 0.3, 0.5))
        ),
    )
    x = np.array(LOGITS)
    x[9] += 5.0
    x[3] = -np.inf
    for token, count in zip(ids.tolist(), counts.tolist(), strict=True):
        x[token] = x[token] / 1.2 if x[token] > 0 else x[token] * 1.2
        x[token] -= 0.3 * count + 0.5 * (count > 0)
    rows = torch.tensor(LOGITS).repeat(DRAWS, 1)
    assert_follows(ops.sample(rows, batch).token_ids.numpy(), probabilities(x.tolist()))


def test_rare_tokens_come_at_their_rate():
    """5000 tokens of probability 1e-6 each beside one that holds the rest."""
    rare = 5000
    logits = [0.0] + [math.log(1e-6 / (1 - rare * 1e-6))] * rare
    tokens = draw(logits, 40_000)
    hits = tokens[tokens > 0]
    expected = len(tokens) * rare * 1e-6
    assert abs(len(hits) - expected) < 4.5 * math.sqrt(expected)
    groups = np.bincount((hits - 1) // (rare // 10), minlength=10)
    assert ((groups - len(hits) / 10) ** 2).sum() / (len(hits) / 10) < 36


@full_vocabulary
def test_the_tail_of_the_noise_at_full_vocabulary():
    """One token at 1 - 2e-9 against 120,831 that share the rest.

    A generator whose largest noise comes too often shows here: with 32-bit uniforms clamped at
    1e-20 (u = 1 has probability 2^-25, its noise 46) 0.36% of the draws would be of the others.
    """
    vocab, draws = 120_832, 4000
    row = torch.full((1, vocab), -math.log(5e8 * (vocab - 1)))
    row[0, 777] = 0.0
    drawn = ops.sample_tokens(row.expand(draws, -1), columns(draws)).numpy()
    assert (drawn == 777).all()


@full_vocabulary
def test_the_tail_is_not_cut_off_either():
    """Tokens of 2.5e-7 each in a vocabulary of 120,832 together get their 3%."""
    vocab, draws = 120_832, 20_000
    rare = 2.5e-7
    row = torch.full((1, vocab), math.log(rare / (1 - rare * (vocab - 1))))
    row[0, 0] = 0.0
    drawn = ops.sample_tokens(row.expand(draws, -1), columns(draws)).numpy()
    expected = draws * rare * (vocab - 1)
    assert abs((drawn > 0).sum() - expected) < 4.5 * math.sqrt(expected)
    assert len(np.unique(drawn[drawn > 0])) > 0.95 * (drawn > 0).sum()


@pytest.mark.parametrize(
    "shift", [{"position": 1}, {"sample_index": 1}, {"seed": 2025}], ids=lambda s: next(iter(s))
)
def test_neighbouring_draws_are_independent(shift: dict[str, int]):
    logits = [1.0, 0.5, 0.0, -0.5]
    p = probabilities(logits)
    if "position" in shift:
        tokens = draw(logits, 20_001)
        first, second = tokens[:-1], tokens[1:]
    else:
        first, second = draw(logits, 20_000), draw(logits, 20_000, **shift)
    assert_follows(first * 4 + second, np.outer(p, p).flatten())
