"""Policies of the tiers, one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.errors import ConfigError
from moestro.kvcache.tier_policy import (
    Speed,
    TierConfig,
    WritePolicy,
    pages_per_move,
    pages_to_clean,
    pages_to_probe,
    should_load,
    should_sink,
)


def test_what_is_not_known_yet_is_loaded_to_know_it() -> None:
    assert should_load(None, 1.0)
    assert should_load(1.0, None)
    assert should_load(1.0, 1.0)
    assert not should_load(1.1, 1.0)


@pytest.mark.parametrize(
    ("gigabytes_per_s", "loads"), [(0.01, False), (0.09, False), (1.0, True), (3.0, True)]
)
def test_a_slow_store_is_not_worth_its_bytes(gigabytes_per_s: float, loads: bool) -> None:
    """4096 tokens of 98 KB, computed at 1000 tokens a second: 4.1 s against 0.4 GB."""
    store, prefill = Speed(), Speed()
    store.add(gigabytes_per_s * 1e9, 1.0, 0.0)
    prefill.add(1000, 1.0, 0.0)
    load_s = store.seconds_for(4096 * 98_304)
    assert should_load(load_s, prefill.seconds_for(4096)) == loads


def test_a_speed_follows_what_is_measured_last() -> None:
    speed = Speed()
    assert speed.per_s is None
    assert speed.seconds_for(5) is None
    for _ in range(3):
        speed.add(100.0, 1.0, 1.0)
    assert speed.per_s == pytest.approx(100)
    assert speed.seconds_for(50) == pytest.approx(0.5)
    for now_s in range(20):
        speed.add(10.0, 1.0, now_s)
    assert 10 < speed.per_s < 13
    assert speed.measured_s == 19


def test_many_small_pieces_do_not_outweigh_a_large_one() -> None:
    speed = Speed()
    speed.add(1000.0, 1.0, 0.0)
    for _ in range(3):
        speed.add(0.01, 0.01, 0.0)
    assert speed.per_s > 900


def test_nothing_done_tells_nothing() -> None:
    speed = Speed()
    speed.add(0, 5.0, 1.0)
    speed.add(5, 0.0, 1.0)
    assert speed.per_s is None
    assert speed.measured_s is None


def test_an_old_measurement_is_stale_and_forgotten_with_the_next() -> None:
    speed = Speed(max_age_s=10.0)
    assert speed.is_stale(0.0)
    speed.add(1.0, 100.0, 0.0)
    assert not speed.is_stale(10.0)
    assert speed.is_stale(10.1)
    speed.add(1000.0, 1.0, 10.1)
    assert speed.per_s == pytest.approx(1000)


def test_a_probe_costs_a_twentieth_of_computing_at_most() -> None:
    assert pages_to_probe(None, 1.0, 100, 8) == 8
    assert pages_to_probe(1.0, None, 100, 8) == 8
    assert pages_to_probe(1.0, 1.0, 100, 8) == 5
    assert pages_to_probe(0.5, 1.0, 100, 8) == 8
    assert pages_to_probe(1000.0, 1.0, 100, 8) == 1
    assert pages_to_probe(0.01, 1.0, 3, 8) == 3


@pytest.mark.parametrize(
    ("policy", "hits", "sinks"),
    [
        (WritePolicy.WRITE_THROUGH, 0, True),
        (WritePolicy.WRITE_THROUGH_SELECTIVE, 1, False),
        (WritePolicy.WRITE_THROUGH_SELECTIVE, 2, True),
        (WritePolicy.WRITE_BACK, 9, False),
    ],
)
def test_when_a_run_sinks(policy: WritePolicy, hits: int, sinks: bool) -> None:
    assert should_sink(policy, hits, selective_hits=2) is sinks


@given(st.integers(0, 1000), st.integers(1, 1000), st.floats(0, 1), st.floats(0, 1))
def test_the_device_is_cleaned_between_its_marks(
    num_free: int, num_pages: int, one: float, other: float
) -> None:
    num_free, low, high = min(num_free, num_pages), min(one, other), max(one, other)
    wanted = pages_to_clean(num_free, num_pages, low, high)
    assert 0 <= wanted <= num_pages
    if num_pages - num_free <= high * num_pages:
        assert wanted == 0
    else:
        assert wanted >= (1 - low) * num_pages


def test_a_move_has_a_page_at_least() -> None:
    assert pages_per_move(100, 1000) == 10
    assert pages_per_move(21_000_000, 8 << 20) == 1
    assert pages_per_move(0, 64) == 64


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_host_slots", -1),
        ("selective_hits", 0),
        ("high_water", 1.5),
        ("low_water", 0.99),
        ("move_chunk_bytes", 0),
        ("fetch_timeout_s", -1.0),
        ("default_priority", 101),
        ("session_share", 2.0),
        ("pin_share", -0.1),
    ],
)
def test_nonsense_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be between"):
        TierConfig(**{field: value})
