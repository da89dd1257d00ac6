"""TokenBudget: decode first, but never all of it for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.errors import ConfigError
from moestro.scheduler import SchedulerLimits
from moestro.scheduler.budget import TokenBudget


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_limits_below_one_are_refused(field: str) -> None:
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1, field: 0}
    with pytest.raises(ConfigError, match=f"{field} must be at least 1, got 0"):
        SchedulerLimits(**sizes)


def limit(budget: TokenBudget, num_rows: int, prefill_waits: bool = True) -> int:
    budget.open_step()
    return budget.decode_limit(num_rows, prefill_waits)


def test_decode_has_all_it_wants_when_prefill_gets_a_quarter_anyway() -> None:
    assert limit(TokenBudget(2048), 128) == 2048
    assert limit(TokenBudget(8), 6) == 8


def test_decode_that_fills_the_step_leaves_a_quarter() -> None:
    assert limit(TokenBudget(8), 8) == 6
    assert limit(TokenBudget(8), 100) == 6
    assert limit(TokenBudget(8), 7) == 6


def test_nothing_is_kept_when_no_prompt_waits() -> None:
    assert limit(TokenBudget(8), 100, prefill_waits=False) == 8


def test_a_budget_of_one_is_lent_every_fourth_step() -> None:
    budget = TokenBudget(1)
    assert [limit(budget, 1) for _ in range(8)] == [1, 1, 1, 0, 1, 1, 1, 0]


@given(st.integers(1, 40), st.integers(1, 60))
def test_over_time_prefill_gets_at_least_a_quarter(max_tokens: int, num_rows: int) -> None:
    budget = TokenBudget(max_tokens)
    steps = 40
    left_over = sum(max_tokens - min(limit(budget, num_rows), num_rows) for _ in range(steps))
    a_quarter = max_tokens // 4 if max_tokens >= 4 else max_tokens / 4
    assert left_over >= steps * a_quarter
