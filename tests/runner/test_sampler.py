"""Sampler: rows with options of their own, alone and together, to the bit, step after step."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import moestro.backends.cpu  # noqa: F401 -- registers the bodies
from moestro.backends import load_backend
from moestro.backends.base import CapturedStep, GraphPool
from moestro.core.sampling_params import SamplingParams
from moestro.core.step import NewSequence, SequenceOutput
from moestro.errors import UnsupportedError
from moestro.ops.noise import gumbel_noise, noise_key
from moestro.runner.sampler import Sampler, score_prompt
from moestro.runner.sequence_state import SequenceState

ROWS = (
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=40, logprobs=20),
    SamplingParams(temperature=1.1, top_p=0.7, logprobs=1),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, logprobs=2),
    SamplingParams(temperature=1.0, frequency_penalty=2.0, presence_penalty=-1.0, logprobs=2),
    SamplingParams(temperature=1.3, min_p=0.2, logit_bias=((5, 3.0), (9, -100.0)), logprobs=3),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_tokens=9, logprobs=5),
)


def sample(
    logits: torch.Tensor, states: list[SequenceState], masks: list[bytes | None]
) -> list[SequenceOutput]:
    return Sampler().sample(logits, states, masks)


def state(i: int) -> SequenceState:
    new = NewSequence(
        seq_id=i,
        token_ids=tuple((i * 31 + j * j) % 300 for j in range(20)),
        num_prompt_tokens=15,
        params=ROWS[i],
        seed=2**63 + i * 12345,
        sample_index=i % 3,
        stop_token_ids=frozenset({0, 7}),
    )
    return SequenceState(new, row=i)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("vocab", [383, 40009, 151669])
def test_a_row_comes_out_the_same_alone_and_among_others(vocab: int, threads: int):
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn((len(ROWS), vocab), generator=g) * 5
    packed = torch.randint(0, 256, (-(-vocab // 8),), generator=g).to(torch.uint8)
    masks = [None, None, bytes(packed.tolist()), *[None] * 4, bytes(packed.flip(0).tolist())]

    def outputs(rows: list[int]) -> list[SequenceOutput]:
        return sample(logits[rows], [state(i) for i in rows], [masks[i] for i in rows])

    torch.set_num_threads(1)
    whole = outputs(list(range(len(ROWS))))
    torch.set_num_threads(threads)
    assert [o.seq_id for o in whole] == list(range(len(ROWS)))
    for o, params in zip(whole, ROWS, strict=True):
        assert o.error is None
        assert [len(e.token_ids) for e in o.logprobs] == (
            [] if params.logprobs is None else [1 + params.logprobs]
        )
        assert all(e.token_ids[0] == o.token_ids[0] for e in o.logprobs)
    for row in range(len(ROWS)):
        assert outputs([row]) == whole[row : row + 1]
    assert outputs([7, 2, 5]) == [whole[7], whole[2], whole[5]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_stops_its_row_only(bad: float):
    g = torch.Generator().manual_seed(1)
    logits = torch.randn((3, 4001), generator=g)
    healthy = sample(logits.clone(), [state(i) for i in (1, 2, 3)], [None] * 3)
    logits[1, 4000] = bad
    got = sample(logits, [state(i) for i in (1, 2, 3)], [None] * 3)
    assert (got[0], got[2]) == (healthy[0], healthy[2])
    assert got[1] == SequenceOutput(2, error=got[1].error)
    assert "not finite" in (got[1].error or "")


def test_every_step_of_a_sequence_draws_afresh():
    one = state(1)
    drawn = []
    for _ in range(30):
        (output,) = sample(torch.zeros(1, 1000), [one], [None])
        drawn.append(output.token_ids[0])
        one.append(output.token_ids[0])
    assert len(set(drawn)) > 25
    assert one.token_ids[20:].tolist() == drawn


def test_scoring_a_prompt_lists_its_own_tokens_first():
    one = state(1)
    logits = torch.randn((3, 500), generator=torch.Generator().manual_seed(5))
    entries, error = score_prompt(logits, one, 4)
    assert error is None
    assert [e.token_ids for e in entries] == [(t,) for t in one.token_ids[5:8].tolist()]
    expected = logits.double().log_softmax(1)
    for row, entry in enumerate(entries):
        assert entry.logprobs[0] == pytest.approx(float(expected[row, entry.token_ids[0]]))
    logits[2, 7] = float("nan")
    assert score_prompt(logits, one, 4)[0] == ()
    assert "not finite" in (score_prompt(logits, one, 4)[1] or "")


def test_a_kept_batch_gives_what_a_new_one_gives():
    """Options are laid out once a batch: what changes from step to step must still be seen."""
    vocab = 383
    g = torch.Generator().manual_seed(12)
    kept, states = Sampler(), [state(i) for i in range(len(ROWS))]
    again = [state(i) for i in range(len(ROWS))]
    for step in range(150):  # past the room that a row's counts have at first, and min_tokens
        order = [0, 1, 2, 3, 4, 5, 6, 7] if step < 80 else [6, 4, 2, 5]
        logits = torch.randn((len(order), vocab), generator=g) * 3
        masks: list[bytes | None] = [None] * len(order)
        if step % 3 == 1:
            masks[1] = bytes([0b10110111] * 48)
        before = logits.clone()
        got = kept.sample(logits, [states[i] for i in order], masks)
        assert torch.equal(logits, before)
        assert got == sample(logits, [again[i] for i in order], masks)
        for i, output in zip(order, got, strict=True):
            for some in (states, again):
                some[i].append(output.token_ids[0])
                if step % 7 == 3:  # more than one new token between two draws
                    some[i].append(step % vocab)


class Counting:
    """A GraphPool that counts its captures."""

    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool
        self.captures = 0

    @property
    def num_bytes(self) -> int:
        return self._pool.num_bytes

    def apart(self) -> GraphPool:
        return self._pool.apart()

    def capture(self, step: Callable[[], Any]) -> CapturedStep:
        self.captures += 1
        return self._pool.capture(step)


def test_a_captured_call_gives_what_an_eager_one_gives():
    native = load_backend("cpu").graph_pool()
    if native is None:
        pytest.skip("nothing captures without the kernel library")
    pool, vocab, plain = Counting(native), 383, [0, 1, 2, 3]
    g = torch.Generator().manual_seed(4)
    kept, states = Sampler(pool), [state(i) for i in range(len(ROWS))]
    again = [state(i) for i in range(len(ROWS))]
    places = {n: torch.empty((n, vocab)) for n in (1, 3, 4, 8)}
    for step in range(60):
        order = [plain, plain[1:], list(range(8)), plain[:1]][step // 15]
        logits = places[len(order)]
        logits.copy_(torch.randn(logits.shape, generator=g) * 3)
        if step == 50:
            logits[0, 9] = float("inf")
        masks: list[bytes | None] = [None] * len(order)
        if step % 5 == 1:
            masks[0] = bytes([0b10110111] * 48)
        rows, others = [states[i] for i in order], [again[i] for i in order]
        got = kept.sample(logits, rows, masks, in_place=True)
        assert got == sample(logits.clone(), others, masks)
        if step % 15 == 9:  # logits from elsewhere, then again from there
            got = kept.sample(logits.clone(), rows, masks)
            assert got == sample(logits, others, masks)
        for one, other, output in zip(rows, others, got, strict=True):
            for token_id in output.token_ids or (1,):
                one.append(token_id)
                other.append(token_id)
    assert pool.captures == 3  # the batch with penalties is laid out anew each step


def test_a_device_that_captures_no_sampling_samples_eagerly():
    class Refusing(Counting):
        def capture(self, step: Callable[[], Any]) -> CapturedStep:
            raise UnsupportedError("not here")

    native = load_backend("cpu").graph_pool()
    if native is None:
        pytest.skip("nothing captures without the kernel library")
    kept, one, logits = Sampler(Refusing(native)), state(1), torch.randn((1, 500))
    for _ in range(4):
        got = kept.sample(logits, [one], [None], in_place=True)
        assert got == sample(logits, [one], [None])
        one.append(got[0].token_ids[0])


def test_the_noise_belongs_to_the_position_of_the_new_token():
    one = state(1)
    logits = torch.randn((1, 500), generator=torch.Generator().manual_seed(3))
    noise = gumbel_noise(torch.arange(500), noise_key(one.seed, 1, 20))
    expected = int((logits[0].double() + noise).argmax())
    (output,) = sample(logits, [one], [None])
    assert output.token_ids == (expected,)
