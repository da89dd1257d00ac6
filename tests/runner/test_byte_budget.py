"""ByteBudget: a rate, and no more than a short burst above it."""

import pytest

from moestro.runner.byte_budget import BURST_S, ByteBudget


def test_the_budget_lets_its_rate_through_and_no_bursts():
    now = [100.0]
    budget = ByteBudget(1000, lambda: now[0])
    assert budget.take(500) == 0.0
    assert budget.take(10) == pytest.approx(0.5)
    now[0] += 100.0
    assert budget.take(1000) == 0.0  # idle time is kept for BURST_S only
    assert budget.take(1) == pytest.approx(1.0 - BURST_S)
    unlimited = ByteBudget(0, lambda: now[0])
    assert unlimited.take(10**12) == unlimited.take(1) == 0.0
