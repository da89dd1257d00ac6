"""PageAllocator: no page lost, none both free and taken, always the same order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.kvcache.allocator import PageAllocator


def test_pages_come_in_order_and_the_last_freed_come_back_first() -> None:
    allocator = PageAllocator(6)
    assert allocator.allocate(4) == [0, 1, 2, 3]
    allocator.free([0, 2])
    assert allocator.allocate(3) == [0, 2, 4]
    assert (allocator.num_free, allocator.num_taken) == (1, 5)


def test_nothing_wanted_nothing_taken() -> None:
    allocator = PageAllocator(2)
    assert allocator.allocate(0) == []
    assert allocator.num_free == 2


def test_more_than_is_free_is_refused_whole() -> None:
    allocator = PageAllocator(2)
    with pytest.raises(ValueError, match="3 pages wanted, 2 are free"):
        allocator.allocate(3)
    assert allocator.num_free == 2


def test_more_than_is_taken_can_not_be_freed() -> None:
    allocator = PageAllocator(3)
    pages = allocator.allocate(1)
    allocator.free(pages)
    with pytest.raises(ValueError, match="1 pages freed, but only 0 are taken"):
        allocator.free(pages)


def test_check_finds_what_is_lost_or_owned_twice() -> None:
    allocator = PageAllocator(3)
    one, other = allocator.allocate(2)
    allocator.check([one, other])
    with pytest.raises(AssertionError, match="page 1 is lost"):
        allocator.check([one])
    with pytest.raises(AssertionError, match="page 0 has two owners"):
        allocator.check([one, other, one])
    with pytest.raises(AssertionError, match="page 2 has two owners"):
        allocator.check([one, other, 2])


@given(st.lists(st.integers(-6, 6), max_size=30))
def test_what_is_taken_and_what_is_free_is_always_everything(steps: list[int]) -> None:
    allocator, taken = PageAllocator(12), []
    for step in steps:
        if step > 0 and step <= allocator.num_free:
            taken += allocator.allocate(step)
        elif step < 0:
            allocator.free(taken[step:])
            del taken[step:]
        allocator.check(taken)
