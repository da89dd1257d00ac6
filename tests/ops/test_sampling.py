"""Edits, draws and log probabilities against plain float64 arithmetic, alone and in batches."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import moestro.backends.cpu  # noqa: F401 -- registers the bodies
from moestro import ops
from moestro.ops.sampling import NO_TOKEN

INF = math.inf


def metadata(rows: int = 1, **columns: object) -> ops.SamplingMetadata:
    """Options by name, one value for all rows or a list."""
    defaults: dict[str, tuple[object, torch.dtype]] = {
        "temperature": (1.0, torch.float64),
        "top_k": (0, torch.int64),
        "top_p": (1.0, torch.float64),
        "min_p": (0.0, torch.float64),
        "seed": (0, torch.int64),
        "sample_index": (0, torch.int64),
        "position": (0, torch.int64),
    }
    made = {}
    for name, (default, dtype) in defaults.items():
        value = torch.as_tensor(columns.get(name, default), dtype=dtype)
        made[name] = value.expand(rows).contiguous()
    return ops.SamplingMetadata(**made)


def select(of: ops.SamplingMetadata, rows: list[int]) -> ops.SamplingMetadata:
    return ops.SamplingMetadata(
        *(
            getattr(of, name)[rows]
            for name in (
                "temperature",
                "top_k",
                "top_p",
                "min_p",
                "seed",
                "sample_index",
                "position",
            )
        )
    )


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def mixed_batch(vocab: int, rows: int = 12) -> tuple[torch.Tensor, ops.SamplingMetadata]:
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn((rows, vocab), generator=g) * 5
    logits[::3] = logits[::3].round()  # ties
    logits[4, torch.rand(vocab, generator=g) < 0.9] = -INF
    logits[4, vocab // 2] = 1.0
    cycle = torch.arange(rows)
    return logits, metadata(
        rows,
        temperature=(cycle % 4) * 0.45,
        top_k=torch.where(cycle % 3 == 1, 7 + cycle, 0),
        top_p=torch.where(cycle % 5 == 2, 0.7, 1.0),
        min_p=torch.where(cycle % 7 == 3, 0.02, 0.0),
        seed=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g),
        sample_index=cycle % 2,
        position=cycle * 1000,
    )


@pytest.mark.parametrize("vocab", [1, 2, 63, 383, 8193, 40009, 120832, 151669])
def test_the_body_draws_what_the_reference_draws(vocab: int):
    logits, options = mixed_batch(vocab)
    expected = ops.sample_tokens.reference(logits, options)
    assert torch.equal(ops.sample_tokens(logits, options), expected)


@pytest.mark.parametrize("temperature", [1e-300, 1e-39, 1e-4, 0.5, 2.0])
@pytest.mark.parametrize("spread", [0.0, 1e-6, 1.0, 1e4, 1e38])
def test_extreme_logits_and_temperatures(temperature: float, spread: float):
    g = torch.Generator().manual_seed(9)
    logits = (torch.rand((8, 3001), generator=g) - 0.5) * spread
    for limits in ({}, {"top_p": 0.9}, {"top_k": 40, "min_p": 0.1}, {"top_p": 1 - 2**-53}):
        options = metadata(8, temperature=temperature, seed=torch.arange(8), **limits)
        drawn = ops.sample_tokens(logits, options)
        assert torch.equal(drawn, ops.sample_tokens.reference(logits, options))
        if temperature < 1e-30 and spread >= 1.0:
            assert torch.equal(drawn, logits.argmax(dim=1))


@pytest.mark.parametrize("vocab", [383, 151669])
def test_a_row_draws_the_same_alone_and_in_any_batch(vocab: int, threads: int):
    logits, options = mixed_batch(vocab)
    torch.set_num_threads(1)
    whole = ops.sample_tokens(logits.clone(), options)
    torch.set_num_threads(threads)
    for rows in ([0], [5], [11], [3, 4], [11, 7, 2, 0], list(range(1, 12))):
        # A view at an odd address, as rows of a larger batch have.
        assert torch.equal(ops.sample_tokens(logits[rows], select(options, rows)), whole[rows])
    for row in range(12):
        alone = ops.sample_tokens(logits[row : row + 1], select(options, [row]))
        assert torch.equal(alone, whole[row : row + 1])


@pytest.mark.parametrize("vocab", [383, 120832, 151669])
@pytest.mark.parametrize("which", ["body", "reference"])
def test_logprobs_have_the_same_bits_alone_and_in_any_batch(vocab: int, which: str, threads: int):
    score = ops.token_logprobs if which == "body" else ops.token_logprobs.reference
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn((5, vocab), generator=g) * 6
    ids = torch.randint(0, vocab, (5,), generator=g)
    torch.set_num_threads(1)
    whole = score(logits, ids, 7)
    torch.set_num_threads(threads)
    for row in range(5):
        for some in (logits[row : row + 1], logits[row].clone()[None]):
            alone = score(some, ids[row : row + 1], 3)
            assert alone.logprobs.tolist() == whole.logprobs[row : row + 1, :4].tolist()
            assert alone.token_ids.tolist() == whole.token_ids[row : row + 1, :4].tolist()
            assert alone.ranks.tolist() == whole.ranks[row : row + 1, :4].tolist()


def test_greedy_and_top_k_1_take_the_lowest_of_equal_ids():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-0.0, 0.0, -1.0, -1.0]])
    for options in (metadata(3, temperature=0.0), metadata(3, top_k=1)):
        for body in (ops.sample_tokens, ops.sample_tokens.reference):
            assert body(logits, options).tolist() == [1, 0, 0]


def test_top_k_and_top_p_break_ties_by_lowest_id():
    logits = torch.zeros(1, 10)
    for limits, kept in (
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_p": 0.35}, {0, 1, 2, 3}),
        ({"top_p": 0.3}, {0, 1, 2}),
        ({"top_p": 1e-9}, {0}),
        ({"top_k": 4, "top_p": 0.5}, {0, 1}),
        ({"min_p": 1.0}, set(range(10))),
    ):
        seen = set()
        for seed in range(150):
            seen.add(int(ops.sample_tokens(logits, metadata(seed=seed, **limits))))
        assert seen == kept, limits


def test_top_p_keeps_the_token_that_crosses_and_no_more():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for top_p, kept in ((0.5, 1), (0.5000001, 2), (0.75, 2), (0.76, 3), (0.9999, 4)):
        seen = {int(ops.sample_tokens(logits, metadata(seed=s, top_p=top_p))) for s in range(200)}
        assert seen == set(range(kept)), top_p


def test_a_row_without_an_allowed_token_says_so():
    logits = torch.full((3, 5), -INF)
    logits[1, 3] = -7.0
    for temperature in (0.0, 1.0):
        options = metadata(3, temperature=temperature, top_p=0.9)
        for body in (ops.sample_tokens, ops.sample_tokens.reference):
            assert body(logits, options).tolist() == [NO_TOKEN, 3, NO_TOKEN]


def test_each_part_of_the_key_changes_the_draw():
    logits = torch.zeros(1, 100_000)
    drawn = {
        int(ops.sample_tokens(logits, metadata(**key)))
        for key in (
            {},
            {"seed": 1},
            {"seed": -1},
            {"sample_index": 1},
            {"position": 1},
            {"seed": 1, "sample_index": 1},
            {"seed": 1, "position": 1},
        )
    }
    assert len(drawn) == 7


def test_penalties_match_plain_arithmetic():
    g = torch.Generator().manual_seed(4)
    logits = torch.randn((3, 50), generator=g) * 9
    before = logits.clone()
    history = [([1, 1, 2, 30], [30, 30, 7]), ([], [0]), ([49], [])]
    params = [(1.3, 0.4, -0.7), (0.5, -2.0, 2.0), (1e38, 0.0, 0.0)]
    entries = []
    starts, sizes = [], []
    for prompt, output in history:
        starts.append(len(entries))
        entries += [(token, output.count(token)) for token in sorted({*prompt, *output})]
        sizes.append(len(entries) - starts[-1])
        entries += [(49, 1000)] * 3  # room between segments: of no meaning
    integers = (torch.tensor(c) for c in (starts, sizes, *zip(*entries, strict=True)))
    floats = (torch.tensor(c, dtype=torch.float64) for c in zip(*params, strict=True))
    ops.apply_penalties(logits, ops.TokenCounts(*integers, *floats))
    for row, (prompt, output) in enumerate(history):
        repetition, frequency, presence = params[row]
        for token in range(50):
            x = float(before[row, token])
            if token in prompt or token in output:
                x = x / repetition if x > 0 else x * repetition
            x -= frequency * output.count(token) + presence * (token in output)
            x = max(min(x, 3.4028234663852886e38), -3.4028234663852886e38)
            assert float(logits[row, token]) == pytest.approx(x, rel=1e-7, abs=1e-7)


def test_penalties_leave_forbidden_tokens_forbidden_and_the_rest_finite():
    logits = torch.tensor([[-INF, 5.0, -5.0]])
    one = torch.ones(1, dtype=torch.float64)
    ids = torch.arange(3)
    at = (torch.tensor([0]), torch.tensor([3]), ids, torch.ones_like(ids))
    for repetition in (1e38, 1e-320):
        x = logits.clone()
        ops.apply_penalties(x, ops.TokenCounts(*at, one * repetition, one * -2, one * -2))
        assert x[0, 0] == -INF
        assert bool(x[0, 1:].isfinite().all())


@pytest.mark.parametrize("vocab", [1, 8, 9, 383, 151669])
def test_masks_are_read_least_significant_bit_first(vocab: int):
    allowed = torch.rand(vocab, generator=torch.Generator().manual_seed(vocab)) < 0.3
    packed = bytearray(-(-vocab // 8))
    for token in allowed.nonzero().flatten().tolist():
        packed[token // 8] |= 1 << (token % 8)
    bits = torch.frombuffer(packed, dtype=torch.uint8)[None]
    logits = torch.zeros(3, vocab)
    ops.apply_token_mask(logits, ops.TokenMask(torch.tensor([-1, 0, -1]), bits))
    assert torch.equal(logits[1] == 0, allowed)
    assert torch.equal(logits[1] == -INF, ~allowed)
    assert not logits[[0, 2]].any()


def test_bias_adds_and_forbids():
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, -INF]])
    starts, sizes, ids = torch.tensor([0, 2]), torch.tensor([2, 1]), torch.tensor([0, 2, 2])
    values = torch.tensor([-100.0, -INF, 100.0])
    ops.apply_token_bias(logits, ops.TokenBias(starts, sizes, ids, values))
    assert logits.tolist() == [[-99.0, 2.0, -INF], [4.0, 5.0, -INF]]


@pytest.mark.parametrize("vocab", [1, 5, 383, 120832])
def test_logprobs_match_log_softmax_in_long_double(vocab: int):
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn((2, vocab), generator=g) * 6
    logits[1] = logits[1].round()
    ids = torch.randint(0, vocab, (2,), generator=g)
    for score in (ops.token_logprobs, ops.token_logprobs.reference):
        got = score(logits, ids, 20)
        assert got.token_ids.shape == (2, 1 + min(20, vocab))
        for row in range(2):
            x = logits[row].numpy().astype(np.longdouble)
            exact = x - x.max() - np.log(np.exp(x - x.max()).sum())
            order = sorted(range(vocab), key=lambda t, x=x: (-x[t], t))
            listed = got.token_ids[row].tolist()
            assert listed == [int(ids[row]), *order[:20]]
            assert got.ranks[row].tolist() == [1 + order.index(t) for t in listed]
            error = np.abs(got.logprobs[row].numpy() - exact[listed].astype(np.float64))
            assert error.max() < 1e-12
