"""Replay: traces whose hit rates are known, an LRU where nothing overlaps, equal runs."""

from pathlib import Path

import pytest

from moestro.errors import ConfigError
from moestro.simulator.offline_lru import HeldLRU, OfflineLRU
from moestro.simulator.replay import Capacity, Clients, Replay, ReplayResult
from moestro.simulator.sim_mover import MoveCosts
from moestro.simulator.sim_runner import StepCosts
from moestro.simulator.workload import Session, TracedRequest, Workload, load_workload

TRACES = Path(__file__).parents[2] / "bench" / "traces"
INSTANT = StepCosts(prefill_tokens_per_s=1e9, decode_step_s=1e-6)


def growing(num_sessions: int, num_turns: int, gap_s: float = 1.0) -> Workload:
    """Each turn adds 4 blocks of 64 to the session's prompt and is answered with 10 tokens."""
    sessions = []
    for at in range(num_sessions):
        requests = tuple(
            TracedRequest(
                at * num_turns + turn, ((1, 4 * turn + 4),), 256 * turn + 256 + 5, 10, gap_s
            )
            for turn in range(num_turns)
        )
        sessions.append(Session(f"s{at}", at, requests))
    return Workload("growing", 64, True, tuple(sessions))


def replayed(
    workload: Workload, capacity: Capacity, costs: StepCosts = INSTANT, **clients: object
) -> ReplayResult:
    made = Clients(**clients)  # type: ignore[arg-type]
    return Replay(workload, capacity, made, costs, MoveCosts()).run()


def test_all_of_the_turn_before_is_found() -> None:
    result = replayed(growing(3, 4), Capacity(device_pages=10_000), num_lanes=2)
    assert result.num_requests == 12
    assert result.device_tokens == 3 * (256 + 512 + 768)
    assert result.queries_tokens == 3 * sum(256 * n + 5 for n in (1, 2, 3, 4))
    assert result.num_prefill_tokens == result.queries_tokens - result.device_tokens


def test_lanes_take_turns_and_evict_each_other() -> None:
    """Two sessions of up to 17 pages in 20: each finds nothing that the other came between."""
    workload = growing(2, 4)
    assert replayed(workload, Capacity(device_pages=20), num_lanes=1).device_tokens == 2 * 1536
    both = replayed(workload, Capacity(device_pages=20), num_lanes=2)
    assert 0 < both.device_tokens < 2 * 1536
    assert both.num_refused == 0


def test_prompts_beyond_the_device_are_refused_and_the_rest_goes_on() -> None:
    result = replayed(growing(2, 4), Capacity(device_pages=10), num_lanes=2)
    assert (result.num_requests, result.num_refused) == (4, 4)


def test_gaps_are_capped() -> None:
    workload = growing(1, 4, gap_s=1000.0)
    result = replayed(workload, Capacity(device_pages=100), gap_cap_s=60.0)
    assert result.virtual_s == pytest.approx(240.0, abs=0.1)


def test_time_is_what_prefill_and_decode_take() -> None:
    costs = StepCosts(prefill_tokens_per_s=1000.0, decode_step_s=0.1)
    result = replayed(growing(1, 1, gap_s=0.0), Capacity(device_pages=100), costs)
    assert result.virtual_s == pytest.approx(0.261 + 9 * 0.1)
    assert result.ttft_s == [pytest.approx(0.261)]


def test_equals_a_plain_lru_when_requests_take_no_time() -> None:
    whole = load_workload(TRACES / "weka" / "claude_code_traces.rle.jsonl.gz")
    begun = tuple(Session(s.name, s.scope, s.requests[:12]) for s in whole.sessions[:24])
    workload = Workload("begun", 64, True, begun)
    capacity = Capacity(device_pages=6000)
    result = replayed(workload, capacity, num_lanes=12)
    offline = OfflineLRU([capacity.device_pages], 64, workload.block_size)
    for scope, request, ends in result.served:
        (offline.end if ends else offline.begin)(scope, request)
    assert offline.queries_tokens == result.queries_tokens
    rate = result.device_tokens / result.queries_tokens
    ideal = offline.ideal_hits_tokens / result.queries_tokens
    assert rate == pytest.approx(offline.hits_tokens[0] / result.queries_tokens, abs=0.005)
    assert 0.1 < rate < ideal - 0.1


@pytest.mark.parametrize("num_pages", [40, 56, 72])
def test_hints_find_more_than_an_lru_under_load(num_pages: int) -> None:
    """Four lanes of sessions of up to 25 pages, and every page that is not pinned is wanted."""
    costs = StepCosts(prefill_tokens_per_s=2000.0, decode_step_s=0.1)
    workload, capacity = growing(8, 6), Capacity(device_pages=num_pages)
    plain = replayed(workload, capacity, costs, num_lanes=4)
    hinted = replayed(workload, capacity, costs, num_lanes=4, pin_ttl_s=60.0)
    lru = HeldLRU(num_pages, 64, workload.block_size, every=1)
    for scope, request, ends in hinted.served:
        (lru.end if ends else lru.begin)(scope, request)
    assert hinted.num_requests == plain.num_requests == 48
    assert hinted.queries_tokens == plain.queries_tokens
    assert hinted.device_tokens > 1.1 * plain.device_tokens
    assert hinted.device_tokens > lru.hits_tokens


def test_host_tier_finds_what_the_device_gave_up() -> None:
    """Four sessions of up to 17 pages in 20, and all of them in the host's 200."""
    workload = growing(4, 4)
    alone = replayed(workload, Capacity(device_pages=20), num_lanes=4)
    result = replayed(workload, Capacity(device_pages=20, host_pages=200), num_lanes=4)
    assert alone.device_tokens < result.device_tokens + result.host_tokens
    assert result.host_tokens > 0
    assert result.device_tokens + result.host_tokens == 4 * 1536


def test_store_finds_what_the_host_gave_up() -> None:
    """Reading a page takes 1 ms, computing it 64 ms."""
    costs = StepCosts(prefill_tokens_per_s=1000.0, decode_step_s=0.001, page_bytes=1_000_000)
    moves = MoveCosts(put_bytes_per_s=1e9, fetch_bytes_per_s=1e9)
    capacity = Capacity(device_pages=20, host_pages=40, store_pages=1000)
    clients = Clients(num_lanes=4)
    result = Replay(growing(4, 4), capacity, clients, costs, moves).run()
    assert result.num_requests == 16
    assert result.store_tokens > 0
    found = result.device_tokens + result.host_tokens + result.store_tokens
    assert found > 0.9 * 4 * 1536


def test_what_takes_longer_to_load_is_computed() -> None:
    """Reading a page takes 1 s, computing it 64 ms: after the first look nothing is read."""
    costs = StepCosts(prefill_tokens_per_s=1000.0, decode_step_s=0.001, page_bytes=1_000_000)
    moves = MoveCosts(put_bytes_per_s=1e9, fetch_bytes_per_s=1e6)
    capacity = Capacity(device_pages=20, store_pages=1000)
    result = Replay(growing(4, 6), capacity, Clients(num_lanes=4), costs, moves).run()
    assert result.num_requests == 16
    assert result.num_refused == 8
    assert result.store_tokens < 0.2 * result.queries_tokens


def test_two_runs_are_equal() -> None:
    workload = load_workload(TRACES / "weka" / "claude_code_traces.rle.jsonl.gz").limited(150, None)
    first, second = (
        replayed(workload, Capacity(device_pages=4000), StepCosts(), num_lanes=8) for _ in range(2)
    )
    assert first == second
    assert first.num_requests == 150


def test_clients_that_can_not_be() -> None:
    with pytest.raises(ConfigError, match="lanes must be at least 1, got 0"):
        Clients(num_lanes=0)
    with pytest.raises(ConfigError, match="gap cap must be 0 s or more, got nan"):
        Clients(gap_cap_s=float("nan"))
