"""PrefixIndex: the longest prefix, one page a name, least recently parked goes first."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moestro.kvcache.prefix_index import PrefixIndex


def name(i: int) -> bytes:
    return bytes([i]) * 16


def test_match_stops_at_the_first_gap_and_at_the_limit() -> None:
    index = PrefixIndex()
    for i in (0, 1, 3):
        index.insert(name(i), 10 + i)
    hashes = [name(i) for i in range(4)]
    assert index.match(hashes, 4) == [10, 11]
    assert index.match(hashes, 1) == [10]
    assert index.match(hashes, 0) == []
    assert index.match(hashes[:1], 4) == [10]
    assert index.match([], 4) == []


def test_the_first_page_of_a_name_stays() -> None:
    index = PrefixIndex()
    assert index.insert(name(1), 5)
    assert not index.insert(name(1), 6)
    assert index.match([name(1)], 1) == [5]
    assert not index.holds(6)


def test_one_page_has_one_name() -> None:
    index = PrefixIndex()
    index.insert(name(1), 5)
    with pytest.raises(ValueError, match="published under another hash"):
        index.insert(name(2), 5)


def test_eviction_in_the_order_of_parking() -> None:
    index = PrefixIndex()
    for page in range(4):
        index.insert(name(page), page)
    for page in (2, 0, 3, 1):
        index.park(page)
    index.unpark(2)
    index.park(2)  # used again: now the newest
    assert list(index.idle_pages()) == [0, 3, 1, 2]
    assert [index.evict() for _ in range(4)] == [0, 3, 1, 2]
    assert len(index) == 0
    with pytest.raises(KeyError):
        index.evict()


def test_misuse_is_refused() -> None:
    index = PrefixIndex()
    index.insert(name(1), 1)
    index.park(1)
    with pytest.raises(ValueError, match="already idle"):
        index.park(1)
    with pytest.raises(ValueError, match="not published"):
        index.park(2)
    index.unpark(1)
    with pytest.raises(KeyError):
        index.unpark(1)


class PrefixIndexMachine(RuleBasedStateMachine):
    """Against a list of (name, page, is idle) in the order of parking."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.pages: dict[bytes, int] = {}
        self.idle: list[int] = []

    @rule(i=st.integers(0, 9), page=st.integers(0, 9))
    def insert(self, i: int, page: int) -> None:
        if page in self.pages.values():
            return
        fresh = name(i) not in self.pages
        assert self.index.insert(name(i), page) == fresh
        if fresh:
            self.pages[name(i)] = page

    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        held = sorted(set(self.pages.values()) - set(self.idle))
        if held:
            page = data.draw(st.sampled_from(held))
            self.index.park(page)
            self.idle.append(page)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def unpark(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.idle))
        self.index.unpark(page)
        self.idle.remove(page)

    @precondition(lambda self: self.idle)
    @rule()
    def evict(self) -> None:
        page = self.idle.pop(0)
        assert self.index.evict() == page
        self.pages = {n: p for n, p in self.pages.items() if p != page}

    @rule(hashes=st.lists(st.integers(0, 9), max_size=6), limit=st.integers(0, 6))
    def match(self, hashes: list[int], limit: int) -> None:
        want = []
        for i in hashes[:limit]:
            if name(i) not in self.pages:
                break
            want.append(self.pages[name(i)])
        assert self.index.match([name(i) for i in hashes], limit) == want

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.index.check()
        assert list(self.index.idle_pages()) == self.idle
        assert self.index.num_idle == len(self.idle)
        assert len(self.index) == len(self.pages)
        assert all(self.index.is_idle(page) for page in self.idle)


TestPrefixIndexMachine = PrefixIndexMachine.TestCase
