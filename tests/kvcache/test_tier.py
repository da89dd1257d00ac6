"""Tier: taking pages from runs that can spare them, tail first, within the water marks."""

import pytest

from moestro.kvcache.event_log import EventLog
from moestro.kvcache.identity import pack_tokens
from moestro.kvcache.prefix_index import PrefixIndex
from moestro.kvcache.run import Run
from moestro.kvcache.tier import Tier


class Pools:
    """Both tiers of one index, pages of one token."""

    def __init__(self, num_pages: int = 8) -> None:
        self.index = PrefixIndex(1)
        log = EventLog(self.index, 1, enabled=False)
        self.device = Tier(num_pages, self.index, "device", log)
        self.host = Tier(num_pages, self.index, "host", log)

    def run(self, tokens: list[int], *, device: bool = True, host: bool = False) -> Run:
        run = self.index.add(self.index.root(""), pack_tokens(tokens))
        if device:
            run.pages = self.device.allocator.allocate(len(tokens))
            self.index.device.add(run)
        if host:
            run.slots = self.host.allocator.allocate(len(tokens))
            self.index.host.add(run)
        return run

    def check(self) -> None:
        self.index.check()
        runs = list(self.index.runs())
        self.device.allocator.check([page for run in runs for page in run.pages])
        self.host.allocator.check([slot for run in runs for slot in run.slots])


def test_free_pages_are_taken_before_anything_is_evicted() -> None:
    pools = Pools()
    run = pools.run([1, 2, 3])
    taken = pools.device.take(5)
    assert len(taken) == 5
    assert run.num_pages == 3
    pools.device.allocator.free(taken)
    pools.check()


def test_the_tail_of_the_oldest_run_goes_first() -> None:
    pools = Pools()
    old, new = pools.run([1, 2, 3]), pools.run([4, 5, 6])
    pools.device.allocator.free(pools.device.take(3))
    assert (old.pages, new.pages) == ([0, 1], [3, 4, 5])
    pools.device.allocator.free(pools.device.take(6))
    assert list(pools.index.runs()) == [new]
    assert len(new.pages) == 2
    assert pools.device.num_evicted_pages == 4
    pools.check()


def test_what_is_in_the_host_too_is_divided_and_stays_there() -> None:
    pools = Pools(4)
    run = pools.run([1, 2, 3, 4], host=True)
    pools.device.allocator.free(pools.device.take(1))
    upper = run.parent
    assert upper is not None
    assert (upper.num_pages, len(upper.pages), len(upper.slots)) == (3, 3, 3)
    assert (run.num_pages, run.pages, len(run.slots)) == (1, [], 1)
    pools.check()


def test_the_rest_of_a_divided_run_keeps_its_turn() -> None:
    pools = Pools(4)
    run = pools.run([1, 2], host=True)
    pools.run([4, 5], host=True)
    pools.device.allocator.free(pools.device.take(1))
    assert pools.index.device.first() is run.parent
    assert pools.index.host.first() is run


def test_saved_runs_are_preferred_when_asked_for() -> None:
    pools = Pools(4)
    unsaved, saved = pools.run([1, 2]), pools.run([4, 5], host=True)
    pools.device.allocator.free(pools.device.take(2, prefer_saved=True))
    assert (len(unsaved.pages), saved.pages) == (2, [])
    pools.device.allocator.free(pools.device.take(3, prefer_saved=True))
    assert len(unsaved.pages) == 1
    pools.check()


@pytest.mark.parametrize(("low", "high", "left"), [(0.5, 0.75, 6), (0.5, 0.7, 4), (0.0, 0.0, 0)])
def test_above_the_high_mark_it_goes_down_to_the_low_one(
    low: float, high: float, left: int
) -> None:
    pools = Pools(8)
    pools.run([1, 2, 3], device=False, host=True)
    pools.run([4, 5, 6], device=False, host=True)
    pools.host.trim(low, high)
    assert pools.host.allocator.num_taken == left
    pools.check()


def test_pinned_runs_are_not_trimmed() -> None:
    pools = Pools(8)
    run = pools.run([1, 2, 3], device=False, host=True)
    pools.index.host.pin(run)
    pools.host.trim(0.0, 0.0)
    assert pools.host.allocator.num_taken == 3
    pools.index.host.unpin(run)
