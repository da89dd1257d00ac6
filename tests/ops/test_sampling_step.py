"""The native sampler against its specification on awkward rows, at every level, split or whole.

The reference sorts; the kernel bounds, selects and skips, by several routes. All must agree.
"""

import math
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch

import moestro.backends.cpu  # noqa: F401 -- registers the bodies
from moestro import ops
from moestro.backends.cpu import library
from moestro.errors import UnsupportedError
from moestro.ops.noise import token_mass
from moestro.ops.sampling import NO_TOKEN
from moestro.ops.testing import assert_same_bits

INF = math.inf
LARGEST = torch.finfo(torch.float32).max
LEVELS = library.native().levels() if library.has_native() else ()
pytestmark = pytest.mark.skipif(not LEVELS, reason="no native library")

TEMPERATURES = (0.0, 1e-300, 1e-39, 1e-4, 0.3, 0.7, 1.0, 1.3, 2.0)
TOP_P = (1.0, 1 - 2**-53, 0.999, 0.9, 0.5, 0.1, 1e-6, 1e-300)
MIN_P = (0.0, 0.0, 1e-320, 1e-5, 0.05, 0.5, 1.0)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    with library.native().at_level(request.param):
        yield request.param


@pytest.fixture
def set_threads() -> Iterator[object]:
    native = library.native()
    before = native.num_threads()
    yield native.set_num_threads
    native.set_num_threads(before)


def awkward_rows(vocab: int, g: torch.Generator) -> torch.Tensor:
    """[14, vocab] fp32."""
    normal = torch.randn(vocab, generator=g)
    uniform = torch.rand(vocab, generator=g)
    ramp = torch.linspace(0, 60, vocab)
    one = torch.full((vocab,), -INF)
    one[vocab // 3] = -5.0
    last = torch.zeros(vocab)
    last[-1] = 3.0
    few = normal * 4
    few[uniform < 0.97] = -INF
    few[0] = 0.0
    rows = (
        normal * 4,
        normal.round(),  # ties everywhere
        torch.zeros(vocab),
        torch.where(uniform < 0.5, 0.0, -0.0),
        torch.where(uniform < 0.01, 1.0, -1.0),
        ramp,
        ramp.flip(0) - 1000.0,
        one,
        last,
        few,
        (uniform - 0.5) * 1e38,
        normal * 1e-6 + 7.0,
        torch.where(uniform < 0.3, LARGEST, -LARGEST),
        normal * 1e-42,  # subnormal
    )
    return torch.stack(rows)


def random_options(rows: int, vocab: int, g: torch.Generator) -> ops.SamplingMetadata:
    def pick(values: tuple[float, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        at = torch.randint(0, len(values), (rows,), generator=g)
        return torch.tensor(values, dtype=dtype)[at]

    top_k = (0, 0, 0, 1, 2, 20, 64, 65, 1000, max(vocab - 1, 1), vocab, vocab + 1)
    return ops.SamplingMetadata(
        temperature=pick(TEMPERATURES),
        top_k=pick(top_k, torch.int64),
        top_p=pick(TOP_P),
        min_p=pick(MIN_P),
        seed=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g),
        sample_index=torch.randint(0, 4, (rows,), generator=g),
        position=torch.randint(0, 2**20, (rows,), generator=g),
    )


@pytest.mark.parametrize("vocab", [1, 2, 31, 1025, 3001])
def test_every_mix_of_options_draws_what_the_reference_draws(vocab: int, level: str):
    g = torch.Generator().manual_seed(vocab)
    for _ in range(12):
        logits = awkward_rows(vocab, g).repeat(4, 1)
        options = random_options(len(logits), vocab, g)
        expected = ops.sample_tokens.reference(logits, options)
        assert torch.equal(ops.sample_tokens(logits, options), expected)


@pytest.mark.parametrize("vocab", [120832, 151936])
def test_full_vocabularies_draw_what_the_reference_draws(vocab: int):
    g = torch.Generator().manual_seed(vocab)
    logits = awkward_rows(vocab, g)
    for _ in range(6):
        options = random_options(len(logits), vocab, g)
        expected = ops.sample_tokens.reference(logits, options)
        for level in LEVELS:
            with library.native().at_level(level):
                assert torch.equal(ops.sample_tokens(logits, options), expected), level


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0])
def test_top_p_at_the_very_edge_of_a_token(spread: float, level: str):
    """Shares that are the mass of k tokens to the last bit, and a little more and less.

    A large vocabulary's whole mass is estimated first: where that can't decide, it must not.
    """
    vocab, g = 20_011, torch.Generator().manual_seed(8)
    row = torch.randn(vocab, generator=g) * spread
    at = torch.randperm(vocab, generator=g)[:300]
    row[at] = 12.0 - torch.arange(300).sqrt().mul(0.8).round(decimals=1)  # some of them tie
    y = row.double().sort(descending=True).values
    mass = token_mass(y - y[0])
    held = mass.cumsum(0)
    shares = []
    for k in (1, 2, 3, 17, 60, 61, 200, 299, 300, 301, 5000):
        edge = float(held[k - 1]) / float(held[-1])
        shares += [edge, math.nextafter(edge, 0.0), math.nextafter(edge, 1.0), edge * (1 + 1e-7)]
    shares = [p for p in shares if p < 1.0] * 12  # other noise each time
    options = random_options(len(shares), vocab, g)
    options = replace(
        options,
        temperature=torch.ones(len(shares), dtype=torch.float64),
        top_p=torch.tensor(shares, dtype=torch.float64),
        top_k=torch.zeros(len(shares), dtype=torch.int64),
        min_p=torch.zeros(len(shares), dtype=torch.float64),
    )
    logits = row.expand(len(shares), -1)
    expected = ops.sample_tokens.reference(logits, options)
    assert torch.equal(ops.sample_tokens(logits, options), expected)


def step_batch(rows: int, vocab: int, g: torch.Generator) -> tuple[torch.Tensor, ops.SamplingBatch]:
    """Rows with every edit, log probabilities and one row that is not finite."""
    logits = torch.randn((rows, vocab), generator=g) * 5
    logits[::3] = logits[::3].round()
    logits[2, vocab - 1] = INF
    row, room = torch.arange(rows), min(vocab, 300)
    ids = torch.stack([torch.randperm(vocab, generator=g)[:room] for _ in range(rows)]).flatten()
    values = torch.randn(rows * room, generator=g) * 20
    values[::5] = -INF
    penalties = torch.rand((3, rows), generator=g, dtype=torch.float64) * 1.5 + 0.2
    return logits, ops.SamplingBatch(
        random_options(rows, vocab, g),
        ops.TokenBias(row * room, row % 4 * (room // 4), ids, values),
        ops.TokenMask(
            row % 3 - 1,
            torch.randint(0, 256, (2, -(-vocab // 8)), generator=g).to(torch.uint8),
        ),
        ops.TokenCounts(
            row * room,
            (row % 5 > 2) * room,
            ids.roll(room // 2),
            torch.randint(0, 4, (rows * room,), generator=g),
            *penalties,
        ),
        (row % 7 - 1) * 3 - 1,
        15,
    )


def select(batch: ops.SamplingBatch, rows: list[int]) -> ops.SamplingBatch:
    """The batch of some of the rows; segments stay where they are."""
    assert batch.bias is not None
    assert batch.mask is not None
    assert batch.counts is not None
    options = {f.name: getattr(batch.metadata, f.name)[rows] for f in fields(batch.metadata)}
    c = batch.counts
    return ops.SamplingBatch(
        ops.SamplingMetadata(**options),
        replace(batch.bias, starts=batch.bias.starts[rows], sizes=batch.bias.sizes[rows]),
        replace(batch.mask, rows=batch.mask.rows[rows]),
        ops.TokenCounts(
            c.starts[rows],
            c.sizes[rows],
            c.token_ids,
            c.output_counts,
            *(p[rows] for p in (c.repetition, c.frequency, c.presence)),
        ),
        None if batch.num_logprobs is None else batch.num_logprobs[rows],
        batch.max_logprobs,
    )


@pytest.mark.parametrize("vocab", [16, 4097, 40009])
def test_a_step_is_its_parts_one_after_the_other(vocab: int, level: str):
    logits, batch = step_batch(15, vocab, torch.Generator().manual_seed(vocab))
    before = logits.clone()
    expected = ops.sample.reference(logits, batch)
    got = ops.sample(logits, batch)
    assert_same_bits(logits, before, "logits")
    assert torch.equal(got.token_ids, expected.token_ids)
    assert torch.equal(got.finite, expected.finite)
    assert got.finite.tolist() == [i != 2 for i in range(15)]
    assert got.logprobs is not None
    assert expected.logprobs is not None
    assert torch.equal(got.logprobs.token_ids, expected.logprobs.token_ids)
    assert torch.equal(got.logprobs.ranks, expected.logprobs.ranks)
    torch.testing.assert_close(
        got.logprobs.logprobs, expected.logprobs.logprobs, rtol=1e-12, atol=1e-12, equal_nan=True
    )


@pytest.mark.parametrize("vocab", [4097, 120832])
def test_a_row_keeps_its_bits_in_any_batch_on_any_number_of_threads(
    vocab: int, level: str, set_threads
):
    logits, batch = step_batch(15, vocab, torch.Generator().manual_seed(vocab))
    set_threads(1)
    whole = ops.sample(logits, batch)
    assert whole.logprobs is not None
    for threads in (1, 2, 3):
        set_threads(threads)
        assert_same_bits(ops.sample(logits, batch), whole, f"{threads} threads")
        for rows in ([0], [1], [5], [2], [14, 3], [4, 2, 9, 11, 6, 1, 8]):
            part = ops.sample(logits[rows], select(batch, rows))
            assert part.logprobs is not None
            assert torch.equal(part.token_ids, whole.token_ids[rows])
            assert torch.equal(part.finite, whole.finite[rows])
            for name in ("token_ids", "logprobs", "ranks"):
                mine, theirs = getattr(part.logprobs, name), getattr(whole.logprobs, name)
                assert_same_bits(mine, theirs[rows], f"{name} of rows {rows}, {threads} threads")


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
@pytest.mark.parametrize("where", ["plain", "biased", "counted", "masked away"])
def test_a_row_that_is_not_finite_is_found_under_any_edit(bad: float, where: str, level: str):
    vocab, at = 3001, 2500
    logits = torch.randn((3, vocab), generator=torch.Generator().manual_seed(1))
    zeros = torch.zeros(3, dtype=torch.int64)
    ids, one = torch.tensor([at, 7]), torch.ones(3, dtype=torch.float64)
    batch = ops.SamplingBatch(random_options(3, vocab, torch.Generator().manual_seed(2)))
    if where == "biased":
        bias = ops.TokenBias(zeros, zeros + 2, ids, torch.tensor([-INF, -INF]))
        batch = replace(batch, bias=bias)
    if where == "counted":
        counts = ops.TokenCounts(zeros, zeros + 2, ids, torch.tensor([1, 2]), one * 3, one, one)
        batch = replace(batch, counts=counts)
    if where == "masked away":
        bits = torch.full((1, -(-vocab // 8)), 255, dtype=torch.uint8)
        bits[0, at // 8] = 0
        batch = replace(batch, mask=ops.TokenMask(zeros, bits))
    healthy = ops.sample(logits, batch)
    assert healthy.finite.tolist() == [True, True, True]
    logits[1, at] = bad
    got = ops.sample(logits, batch)
    assert got.finite.tolist() == [True, False, True]
    assert got.token_ids.tolist() == [
        int(healthy.token_ids[0]),
        NO_TOKEN,
        int(healthy.token_ids[2]),
    ]


def test_forbidding_every_token_leaves_none(level: str):
    logits = torch.zeros(2, 100)
    options = random_options(2, 100, torch.Generator().manual_seed(3))
    mask = ops.TokenMask(torch.tensor([0, -1]), torch.zeros((1, 13), dtype=torch.uint8))
    batch = ops.SamplingBatch(options, mask=mask, num_logprobs=torch.tensor([2, 2]), max_logprobs=2)
    got = ops.sample(logits, batch)
    assert got.finite.tolist() == [True, True]
    assert int(got.token_ids[0]) == NO_TOKEN
    assert int(got.token_ids[1]) >= 0
    assert got.logprobs is not None
    assert got.logprobs.token_ids[0].tolist() == [NO_TOKEN] * 3
    assert got.logprobs.logprobs[0].isnan().all()


def test_a_token_outside_the_vocabulary_is_named():
    logits = torch.zeros(1, 10)
    options = random_options(1, 10, torch.Generator().manual_seed(4))
    zero, one = torch.tensor([0]), torch.tensor([1])
    bias = ops.TokenBias(zero, one, torch.tensor([10]), torch.ones(1))
    with pytest.raises(ValueError, match="10; the vocabulary is 0 to 9"):
        ops.sample(logits, ops.SamplingBatch(options, bias=bias))
    with pytest.raises(ValueError, match="of row 0"):
        ops.sample(logits, ops.SamplingBatch(options, bias=replace(bias, starts=one)))
    with pytest.raises(ValueError, match="-1; the vocabulary is 0 to 9"):
        ops.token_logprobs(logits, torch.tensor([-1]), 2)
    mask = ops.TokenMask(one, torch.zeros((1, 2), dtype=torch.uint8))
    with pytest.raises(ValueError, match="mask 1 of 1"):
        ops.sample(logits, ops.SamplingBatch(options, mask=mask))


def _row_metadata(rows: int) -> ops.SamplingMetadata:
    doubles, ints = torch.ones(rows, dtype=torch.float64), torch.ones(rows, dtype=torch.int64)
    return ops.SamplingMetadata(doubles, ints, doubles, doubles * 0, ints, ints, ints)


@pytest.mark.parametrize("name", [field.name for field in fields(ops.SamplingMetadata)])
def test_options_of_other_types_or_strides_are_refused(name: str) -> None:
    """The kernel reads their memory as it lies: a float32 temperature would be another number."""
    metadata = _row_metadata(3)
    right = getattr(metadata, name)
    for wrong in (right.to(torch.int32), right.repeat(2)[::2], right[:2]):
        with pytest.raises(ValueError, match="must be a contiguous"):
            replace(metadata, **{name: wrong})


def test_edits_of_other_types_or_sizes_are_refused() -> None:
    metadata, ints = _row_metadata(2), torch.zeros(2, dtype=torch.int64)
    doubles = ints.double()
    mask = ops.TokenMask(ints, torch.full((1, 5), 255, dtype=torch.uint8))
    bias = ops.TokenBias(ints, ints, ints[:0], torch.zeros(0))
    counts = ops.TokenCounts(ints, ints, ints[:0], ints[:0], doubles + 1, doubles, doubles)
    batch = ops.SamplingBatch(metadata, bias, mask, counts, ints, 0)
    wrong = (
        (mask, {"rows": ints.int()}),
        (mask, {"bits": mask.bits.int()}),
        (bias, {"values": torch.zeros(0).double()}),
        (bias, {"sizes": ints[:1]}),
        (counts, {"repetition": torch.ones(2)}),
        (counts, {"output_counts": ints}),
        (batch, {"num_logprobs": ints.int()}),
        (batch, {"num_logprobs": ints[:1]}),
        (batch, {"metadata": _row_metadata(3)}),
    )
    for right, field in wrong:
        with pytest.raises(ValueError, match="must be a contiguous"):
            replace(right, **field)


def test_a_batch_of_other_rows_or_words_than_the_logits_is_refused() -> None:
    metadata, rows = _row_metadata(2), torch.zeros(2, dtype=torch.int64)
    mask = ops.TokenMask(rows, torch.full((1, 5), 255, dtype=torch.uint8))
    ops.sample(torch.randn(2, 40), ops.SamplingBatch(metadata, mask=mask))
    for logits in (torch.randn(3, 40), torch.randn(2, 41)):
        with pytest.raises(UnsupportedError, match="sample"):
            ops.sample(logits, ops.SamplingBatch(metadata, mask=mask))
    with pytest.raises(UnsupportedError, match="sample_tokens"):
        ops.sample_tokens(torch.randn(3, 40), metadata)


def test_scored_tokens_that_do_not_lie_in_a_row_are_refused() -> None:
    logits, ids = torch.randn(2, 40), torch.arange(4)
    for wrong in (ids[::2], ids[:1], ids[:2].view(1, 2)):
        with pytest.raises(UnsupportedError, match="token_logprobs"):
            ops.token_logprobs(logits, wrong, 0)
