"""VirtualRunner: what steps take and give, driven by hand-made schedules."""

import math

import pytest

from moestro.core.page_moves import PageLoad
from moestro.core.sampling_params import SamplingParams
from moestro.core.step import NewSequence, Schedule, ScheduledSequence
from moestro.errors import ConfigError
from moestro.simulator.clock import VirtualClock
from moestro.simulator.sim_runner import StepCosts, VirtualRunner
from moestro.simulator.workload import unique_token

COSTS = StepCosts(
    prefill_tokens_per_s=1000.0,
    decode_step_s=0.5,
    chunk_tokens=100,
    page_bytes=10,
    load_bytes_per_s=100.0,
)


def new(seq_id: int, num_tokens: int, max_tokens: int, num_prompt: int = 0) -> NewSequence:
    params = SamplingParams(max_tokens=max_tokens)
    prompt = num_prompt or num_tokens
    return NewSequence(seq_id, (7,) * num_tokens, prompt, params, 40 + seq_id, 0, frozenset())


def run(seq_id: int, start: int, num_tokens: int, samples: bool = True) -> ScheduledSequence:
    return ScheduledSequence(seq_id, start, num_tokens, (), samples)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def runner(clock: VirtualClock) -> VirtualRunner:
    return VirtualRunner(clock, COSTS)


def test_prefill_takes_its_tokens_and_samples_one(
    runner: VirtualRunner, clock: VirtualClock
) -> None:
    output = runner.execute(Schedule(0, (run(3, 64, 250),), (new(3, 314, 5),)))
    assert clock() == pytest.approx(0.25)
    assert output.sequences[0].token_ids == (unique_token(43),)
    assert runner.num_prefill_tokens == 250


def test_decode_goes_on_until_the_first_ends(runner: VirtualRunner, clock: VirtualClock) -> None:
    first = Schedule(0, (run(0, 0, 10), run(1, 0, 10)), (new(0, 10, 4), new(1, 10, 9)))
    runner.execute(first)
    begun = clock()
    output = runner.execute(Schedule(1, (run(0, 10, 1), run(1, 10, 1))))
    assert [len(o.token_ids) for o in output.sequences] == [3, 3]
    assert clock() - begun == pytest.approx(1.5)
    # The scheduler accounts for what has been decoded already: that takes no prefill time.
    output = runner.execute(Schedule(2, (run(1, 11, 3),), released=(0,)))
    assert len(output.sequences[0].token_ids) == 5
    assert clock() - begun == pytest.approx(4.0)
    assert runner.num_prefill_tokens == 20


def test_decode_stops_where_something_happens(runner: VirtualRunner, clock: VirtualClock) -> None:
    runner.execute(Schedule(0, (run(0, 0, 10),), (new(0, 10, 500),)))
    runner.horizon_s = clock() + 1.2
    output = runner.execute(Schedule(1, (run(0, 10, 1),)))
    assert len(output.sequences[0].token_ids) == 3
    runner.horizon_s = math.inf
    output = runner.execute(Schedule(2, (run(0, 11, 3),)))
    assert len(output.sequences[0].token_ids) == 64


def test_decodes_go_on_between_the_chunks_of_a_prefill(
    runner: VirtualRunner, clock: VirtualClock
) -> None:
    runner.execute(Schedule(0, (run(0, 0, 10),), (new(0, 10, 500),)))
    begun = clock()
    both = (run(0, 10, 1), run(1, 0, 350, samples=False))
    output = runner.execute(Schedule(1, both, (new(1, 400, 5),)))
    assert [len(o.token_ids) for o in output.sequences] == [4, 0]
    assert clock() - begun == pytest.approx(0.35 + 4 * 0.5)


def test_preempted_sequence_is_computed_again(runner: VirtualRunner, clock: VirtualClock) -> None:
    runner.execute(Schedule(0, (run(0, 0, 10),), (new(0, 10, 4),)))
    runner.execute(Schedule(1, (), released=(0,)))
    begun = clock()
    again = new(0, 12, 4, num_prompt=10)
    output = runner.execute(Schedule(2, (run(0, 0, 12),), (again,)))
    assert clock() - begun == pytest.approx(0.012)
    assert len(output.sequences[0].token_ids) == 1
    output = runner.execute(Schedule(3, (run(0, 12, 1),)))
    assert len(output.sequences[0].token_ids) == 1


def test_loads_overlap_with_the_computing(runner: VirtualRunner, clock: VirtualClock) -> None:
    loads = (PageLoad((0, 1, 2), (4, 5, 6)),)
    output = runner.execute(Schedule(0, (run(0, 192, 100),), (new(0, 292, 5),), loads=loads))
    assert clock() == pytest.approx(0.3)
    assert (output.load_bytes, output.load_s) == (30, pytest.approx(0.3))


def test_costs_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="decode_step_s must be positive, got 0"):
        StepCosts(decode_step_s=0)
