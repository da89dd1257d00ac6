"""PageAllocator: no page lost, none both free and held, always the same order."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from moestro.kvcache.allocator import PageAllocator


def test_pages_come_in_order_and_the_last_freed_comes_back_first() -> None:
    allocator = PageAllocator(6)
    assert allocator.allocate(4) == [0, 1, 2, 3]
    for page in (2, 0):
        assert allocator.drop(page) == 0
        allocator.free(page)
    assert allocator.allocate(3) == [0, 2, 4]
    assert allocator.num_free == 1


def test_nothing_wanted_nothing_taken() -> None:
    allocator = PageAllocator(2)
    assert allocator.allocate(0) == []
    assert allocator.num_free == 2


def test_more_than_is_free_is_refused_whole() -> None:
    allocator = PageAllocator(2)
    with pytest.raises(ValueError, match="3 pages wanted, 2 are free"):
        allocator.allocate(3)
    assert allocator.num_free == 2


def test_misuse_is_refused() -> None:
    allocator = PageAllocator(3)
    (page,) = allocator.allocate(1)
    with pytest.raises(ValueError, match="can't be freed"):
        allocator.free(page)  # held
    with pytest.raises(ValueError, match="can't be shared"):
        allocator.retain(2)  # free
    with pytest.raises(ValueError, match="no holder"):
        allocator.drop(2)
    allocator.drop(page)
    allocator.free(page)
    with pytest.raises(ValueError, match="can't be freed"):
        allocator.free(page)  # twice


def test_check_finds_a_page_that_is_free_and_held() -> None:
    allocator = PageAllocator(3)
    (page,) = allocator.allocate(1)
    allocator._free.append(page)
    with pytest.raises(AssertionError):
        allocator.check()


class AllocatorMachine(RuleBasedStateMachine):
    """Against a model that counts holders by hand."""

    holds = Bundle("holds")
    idle = Bundle("idle")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(12)
        self.counts = [0] * 12
        self.idle_pages: set[int] = set()

    @rule(target=holds, wanted=st.integers(0, 5))
    def allocate(self, wanted: int) -> object:
        if wanted > self.allocator.num_free:
            return multiple()
        pages = self.allocator.allocate(wanted)
        assert len(pages) == wanted
        for page in pages:
            assert self.counts[page] == 0
            assert page not in self.idle_pages
            self.counts[page] = 1
        return multiple(*pages)

    @rule(target=holds, page=holds)
    def share(self, page: int) -> int:
        self.allocator.retain(page)
        self.counts[page] += 1
        return page

    @rule(target=idle, page=consumes(holds))
    def drop(self, page: int) -> object:
        self.counts[page] -= 1
        assert self.allocator.drop(page) == self.counts[page]
        if self.counts[page]:
            return multiple()
        self.idle_pages.add(page)
        return page

    @rule(target=holds, page=consumes(idle))
    def revive(self, page: int) -> int:
        self.idle_pages.remove(page)
        self.allocator.retain(page)
        self.counts[page] = 1
        return page

    @rule(page=consumes(idle))
    def free(self, page: int) -> None:
        self.idle_pages.remove(page)
        self.allocator.free(page)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.allocator.check()
        assert [self.allocator.count(page) for page in range(12)] == self.counts
        held = sum(1 for count in self.counts if count)
        assert self.allocator.num_free == 12 - held - len(self.idle_pages)


TestAllocatorMachine = AllocatorMachine.TestCase
