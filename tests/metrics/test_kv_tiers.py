"""The KV tiers on /metrics: vLLM's names, the engine's totals, nothing of tiers that are off."""

from dataclasses import replace

import pytest
from tests.metrics.kv_numbers import FULL
from tests.metrics.test_server_metrics import BASE, families, make, value

from moestro.core.kv_stats import KVTierStats
from moestro.core.messages import EngineStats
from moestro.metrics import ServerMetrics


def told(kv: KVTierStats | None, store_source: str = "disk") -> ServerMetrics:
    metrics = ServerMetrics("m", 3000, {}, store_source)
    metrics.observe_step(EngineStats(kv=kv))
    return metrics


@pytest.mark.parametrize("source", ["disk", "external_unspecified"])
def test_cached_tokens_by_source(source: str) -> None:
    metrics = told(FULL, source)
    name = "vllm:prompt_tokens_cached_by_source_total"
    sources = {"device": 64, "host": 128, source: 256}
    assert {s: value(metrics, name, source=s) for s in sources} == sources
    assert value(metrics, "vllm:prompt_tokens_cached_total") == 448
    assert value(metrics, "vllm:external_prefix_cache_queries_total") == 900
    assert value(metrics, "vllm:external_prefix_cache_hits_total") == 384


def test_hits_below_the_device_are_counted_apart() -> None:
    """As in vLLM: prefix_cache_hits + external_prefix_cache_hits is what the sources sum up to."""
    metrics = ServerMetrics("m", 3000, {})
    metrics.observe_step(EngineStats(kv=FULL, prefix_hits_tokens=448))
    assert value(metrics, "vllm:prefix_cache_hits_total") == 64


def test_every_number_of_a_tier_that_has_it() -> None:
    metrics = told(FULL)
    found = {
        (name, tier): metrics.registry.get_sample_value(
            f"moestro:kv_tier_{name}", BASE | {"tier": tier}
        )
        for name in (
            "used_bytes",
            "capacity_bytes",
            "pinned_bytes",
            "promoted_pages_total",
            "demoted_pages_total",
            "evicted_pages_total",
            "load_bytes_total",
            "load_seconds_total",
        )
        for tier in ("device", "host", "store")
    }
    assert {key: number for key, number in found.items() if number is not None} == {
        ("used_bytes", "device"): 1000,
        ("used_bytes", "host"): 3000,
        ("used_bytes", "store"): 5000,
        ("capacity_bytes", "device"): 2000,
        ("capacity_bytes", "host"): 4000,
        ("capacity_bytes", "store"): 6000,
        ("pinned_bytes", "device"): 300,
        ("promoted_pages_total", "host"): 1,
        ("promoted_pages_total", "store"): 4,
        ("demoted_pages_total", "host"): 2,
        ("demoted_pages_total", "store"): 5,
        ("evicted_pages_total", "device"): 7,
        ("evicted_pages_total", "host"): 3,
        ("evicted_pages_total", "store"): 6,
        ("load_bytes_total", "host"): 4096,
        ("load_bytes_total", "store"): 8192,
        ("load_seconds_total", "host"): 0.5,
        ("load_seconds_total", "store"): 2.5,
    }


def test_the_store_and_its_breaker() -> None:
    metrics = told(FULL)
    assert value(metrics, "moestro:kv_queued_bytes") == 12345
    assert value(metrics, "moestro:kv_store_failures_total", kind="timeout") == 4
    assert value(metrics, "moestro:kv_store_failures_total", kind="corrupt") == 2
    assert value(metrics, "moestro:kv_store_quarantined_pages_total") == 8
    states = ("closed", "half_open", "open")
    assert [value(metrics, "moestro:kv_store_breaker", state=s) for s in states] == [0, 1, 0]
    assert value(metrics, "moestro:kv_recomputed_tokens_total") == 77


def test_hints_by_action_and_outcome() -> None:
    metrics = told(FULL)
    hints, tokens = "moestro:kv_hints_total", "moestro:kv_hint_tokens_total"
    assert value(metrics, hints, action="pin", outcome="accepted") == 3
    assert value(metrics, hints, action="pin", outcome="refused") == 1
    assert value(metrics, tokens, action="pin", outcome="clipped") == 20
    assert value(metrics, tokens, action="drop", outcome="accepted") == 100
    assert (value(metrics, "moestro:kv_pins"), value(metrics, "moestro:kv_sessions")) == (2, 9)


def test_what_is_off_is_not_exposed() -> None:
    nothing = set(families(told(None)))
    assert nothing == set(families(make()))
    device_only = KVTierStats(tiers=FULL.tiers[:1])
    more = set(families(told(device_only))) - nothing
    assert "vllm:prompt_tokens_cached_by_source" in more
    assert not {name for name in more if "external" in name or "store" in name}
    assert FULL.mover is not None
    no_store = replace(FULL, tiers=FULL.tiers[:2], mover=replace(FULL.mover, breaker="none"))
    more = set(families(told(no_store))) - nothing
    assert "vllm:external_prefix_cache_hits" in more
    assert not {name for name in more if "store" in name}


def test_batches_of_events() -> None:
    metrics = make()
    assert "moestro:kv_event_batches" not in families(metrics)
    metrics.kv_tiers.watch_events(lambda: (10, 3))
    name = "moestro:kv_event_batches_total"
    assert [value(metrics, name, outcome=o) for o in ("published", "dropped")] == [10, 3]


def test_the_newest_numbers_are_shown() -> None:
    metrics = told(FULL)
    metrics.observe_step(EngineStats(kv=replace(FULL, num_pins=0)))
    assert value(metrics, "moestro:kv_pins") == 0
