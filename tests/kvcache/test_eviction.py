"""EvictionOrder: lowest priority first, then least recently used; pins keep their place."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moestro.kvcache.eviction import EvictionOrder
from moestro.kvcache.run import Run


def make_run(num_pages: int = 1, priority: int = 50) -> Run:
    return Run(None, b"", num_pages, priority)


def test_the_least_recently_used_goes_first() -> None:
    order = EvictionOrder()
    a, b, c = make_run(), make_run(), make_run()
    for run in (a, b, c):
        order.add(run)
    order.touch(a)
    assert list(order) == [b, c, a]
    order.discard(b)
    assert order.first() is c
    order.add(b, oldest=True)
    assert order.first() is b


def test_low_priority_goes_first_whenever_it_was_used() -> None:
    order = EvictionOrder()
    high, low, middle = make_run(1, 90), make_run(1, 5), make_run(1, 50)
    for run in (high, low, middle):
        order.add(run)
    assert list(order) == [low, middle, high]


def test_a_pin_passes_a_run_over_and_gives_its_place_back() -> None:
    order = EvictionOrder()
    a, b = make_run(3), make_run(2)
    order.add(a)
    order.add(b)
    order.pin(a)
    order.pin(a)
    assert (order.first(), order.num_pages) == (b, 2)
    order.unpin(a)
    assert order.first() is b
    order.unpin(a)
    assert (order.first(), order.num_pages) == (a, 5)
    with pytest.raises(KeyError):
        order.unpin(a)


def test_one_run_is_there_once() -> None:
    order = EvictionOrder()
    run = make_run()
    order.add(run)
    with pytest.raises(ValueError, match="in the eviction order already"):
        order.add(run)


class EvictionMachine(RuleBasedStateMachine):
    """Against a list in the order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.order = EvictionOrder()
        self.all: list[Run] = []
        self.listed: list[Run] = []
        self.pins: dict[Run, int] = {}

    @rule(num_pages=st.integers(1, 9), priority=st.integers(0, 2))
    def make(self, num_pages: int, priority: int) -> None:
        self.all.append(make_run(num_pages, priority))

    @precondition(lambda self: self.all)
    @rule(data=st.data(), oldest=st.booleans())
    def add_or_discard(self, data: st.DataObject, oldest: bool) -> None:
        run = data.draw(st.sampled_from(self.all))
        if run in self.listed:
            self.order.discard(run)
            self.listed.remove(run)
        else:
            self.order.add(run, oldest)
            self.listed.insert(0 if oldest else len(self.listed), run)

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.all))
        self.order.touch(run)
        if run in self.listed:
            self.listed.remove(run)
            self.listed.append(run)

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.all))
        self.order.pin(run)
        self.pins[run] = self.pins.get(run, 0) + 1

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from([run for run, pins in self.pins.items() if pins]))
        self.order.unpin(run)
        self.pins[run] -= 1

    @invariant()
    def agrees_with_the_list(self) -> None:
        self.order.check()
        want = sorted(self.listed, key=lambda run: run.priority)  # stable: keeps the order of use
        assert list(self.order) == want
        free = [run for run in want if not self.pins.get(run)]
        assert self.order.first() is (free[0] if free else None)
        assert self.order.num_pages == sum(run.num_pages for run in free)


TestEvictionMachine = EvictionMachine.TestCase
