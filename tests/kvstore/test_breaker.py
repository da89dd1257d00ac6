"""The circuit breaker as a policy, with a clock that the test moves."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moestro.kvstore.breaker import CLOSED, HALF_OPEN, OPEN, CircuitBreaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(clock: Clock) -> CircuitBreaker:
    breaker = CircuitBreaker(clock, threshold=3, cool_down_s=1.0, max_cool_down_s=4.0)
    for _ in range(3):
        assert breaker.allow()
        breaker.failed()
    assert breaker.state == OPEN
    return breaker


def test_opens_after_so_many_failures_in_a_row(clock: Clock) -> None:
    breaker = CircuitBreaker(clock, threshold=3)
    breaker.failed()
    breaker.failed()
    breaker.succeeded()
    breaker.failed()
    breaker.failed()
    assert breaker.state == CLOSED
    assert breaker.allow()
    breaker.failed()
    assert breaker.state == OPEN
    assert not breaker.allow()


def test_one_probe_after_the_cool_down_closes_it(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now += 0.9
    assert not breaker.allow()
    assert breaker.retry_after_s == pytest.approx(0.1)
    clock.now += 0.1
    assert breaker.state == HALF_OPEN
    assert breaker.allow()
    assert not breaker.allow()
    assert breaker.state == HALF_OPEN
    breaker.succeeded()
    assert breaker.state == CLOSED
    assert breaker.allow()
    assert breaker.retry_after_s == 0


def test_failed_probes_double_the_cool_down_up_to_a_limit(clock: Clock) -> None:
    breaker = opened(clock)
    for expected in (1.0, 2.0, 4.0, 4.0):
        assert breaker.retry_after_s == expected
        clock.now += expected
        assert breaker.allow()
        breaker.failed()
    clock.now += 4.0
    assert breaker.allow()
    breaker.succeeded()
    for _ in range(3):
        breaker.failed()
    assert breaker.retry_after_s == 1.0


def test_late_failures_of_earlier_calls_change_nothing(clock: Clock) -> None:
    breaker = opened(clock)
    breaker.failed()
    breaker.failed()
    assert breaker.retry_after_s == 1.0


def test_a_probe_that_was_never_sent_is_given_to_the_next(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now += 1.0
    assert breaker.allow()
    breaker.gave_up()
    assert breaker.allow()


def test_a_probe_that_never_answers_blocks_nobody_for_ever(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now += 1.0
    assert breaker.allow()
    clock.now += 1.0
    assert breaker.allow()


class BreakerMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order: never shut for longer than the longest cool-down."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = CircuitBreaker(self.clock, cool_down_s=1.0, max_cool_down_s=4.0)
        self.in_flight = 0

    @rule()
    def call(self) -> None:
        self.in_flight += self.breaker.allow()

    @precondition(lambda self: self.in_flight)
    @rule(outcome=st.sampled_from(["succeeded", "failed", "gave_up"]))
    def answer(self, outcome: str) -> None:
        self.in_flight -= 1
        getattr(self.breaker, outcome)()
        if outcome == "succeeded":
            assert self.breaker.state == CLOSED

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def bounded(self) -> None:
        assert 0 <= self.breaker.retry_after_s <= 4.0
        assert (self.breaker.state == OPEN) <= (self.breaker.retry_after_s > 0)


TestBreakerMachine = BreakerMachine.TestCase
