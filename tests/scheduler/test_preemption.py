"""Too little KV memory: who gives way, what is kept, and that everybody gets there."""

import pytest
from tests.scheduler.loop import Loop, make_request
from tests.scheduler.test_scheduler import assert_as_expected, runs


def crowded(max_tokens: int = 8, **options: object) -> Loop:
    """Two sequences of 2 pages each in a pool of 4: the first to grow needs a page."""
    loop = Loop(num_pages=4, **options)  # type: ignore[arg-type]
    for name, token_id in (("a", 1), ("b", 2)):
        loop.add(make_request(name, [token_id] * 8, max_tokens=max_tokens))
    loop.step()
    assert loop.scheduler.stats().num_pages_used == 4
    return loop


def test_the_latest_gives_way_and_comes_back_with_all_its_tokens() -> None:
    loop = crowded()
    schedule = loop.step()
    assert runs(schedule) == [(0, 8, 1)]
    assert schedule is not None
    assert schedule.released == (1,)
    stats = loop.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (1, 1, 1)
    given = list(loop.results["b", 0].token_ids)
    assert len(given) == 1
    while not loop.runner.schedules[-1].new_sequences:
        loop.step()
    (new,) = loop.runner.schedules[-1].new_sequences
    assert new.seq_id == 1
    assert new.token_ids == (*[2] * 8, *given)
    assert new.num_prompt_tokens == 8
    loop.run()
    assert_as_expected(
        loop, make_request("a", [1] * 8, max_tokens=8), make_request("b", [2] * 8, max_tokens=8)
    )


@pytest.mark.parametrize("caching", [True, False])
def test_a_preempted_sequence_may_hit_its_own_pages(caching: bool) -> None:
    loop = crowded(enable_prefix_caching=caching, max_tokens=3)
    loop.run()
    back = next(s for s in loop.runner.schedules[1:] if s.new_sequences)
    # One of its two pages was what the other needed: the last one, so the first is still good.
    assert back.sequences[0].start == (4 if caching else 0)
    assert loop.results["b", 0].num_cached_tokens == 0


def test_who_needs_a_page_and_is_last_waits_with_its_pages() -> None:
    loop = Loop(num_pages=4)
    loop.add(make_request("a", [1] * 5, max_tokens=3), make_request("b", [2] * 8, max_tokens=8))
    loop.step()
    assert runs(loop.step()) == [(0, 5, 1)]
    assert loop.scheduler.stats().num_preemptions == 0
    assert loop.scheduler.stats().num_running == 2
    loop.run()
    assert len(loop.results["b", 0].token_ids) == 8
    assert loop.scheduler.stats().num_preemptions == 0


def test_who_gave_way_does_not_come_back_or_is_overtaken_in_that_step() -> None:
    loop = crowded()
    loop.add(make_request("c", [3], max_tokens=1))
    schedule = loop.step()
    assert schedule is not None
    assert schedule.released
    assert not schedule.new_sequences


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    loop = Loop(num_pages=4)
    loop.add(make_request("a", [1] * 8, max_tokens=4))
    loop.step()
    loop.add(make_request("big", [2] * 12, max_tokens=1), make_request("small", [3], max_tokens=1))
    loop.step()
    assert loop.scheduler.stats().num_waiting == 2
    loop.run()
    first_seen = [new.seq_id for s in loop.runner.schedules for new in s.new_sequences]
    assert first_seen == [0, 1, 2]


@pytest.mark.parametrize("max_len", [200, 16])
def test_a_sequence_alone_fills_the_pool_or_the_context_and_ends(max_len: int) -> None:
    loop = Loop(num_pages=5, max_model_len=max_len)
    request = make_request("a", [1] * 7, max_tokens=1000)
    loop.add(request)
    loop.run()
    assert_as_expected(loop, request)
    assert len(loop.results["a", 0].token_ids) == min(21, max_len) - 7


def test_many_that_fill_the_pool_alone_all_end() -> None:
    loop = Loop(num_pages=4, max_num_batched_tokens=3)
    requests = [make_request(str(i), [i] * (1 + i), max_tokens=17 - 1 - i) for i in range(8)]
    loop.add(*requests)
    loop.run(400)
    assert_as_expected(loop, *requests)
    assert loop.scheduler.stats().num_preemptions > 0


def test_big_pools_keep_room_to_grow() -> None:
    loop = Loop(num_pages=64, max_num_seqs=64, max_num_batched_tokens=1000, page_size=4)
    loop.add(*(make_request(str(i), [i] * 8, max_tokens=9) for i in range(40)))
    loop.step()
    # 31 sequences of 2 pages leave 2: the 32nd would leave none for the others to grow into.
    assert loop.scheduler.stats().num_running == 31
    loop.run()
