"""n > 1: one request, n sequences, one computation of the prompt."""

import pytest
from tests.fakes.scripted_runner import Script
from tests.scheduler.loop import Loop, make_request
from tests.scheduler.test_scheduler import assert_as_expected, runs

from moestro.core.request import FinishReason

PROMPT = list(range(1, 11))


def test_siblings_wait_for_the_first_ones_prompt_and_share_its_pages() -> None:
    loop = Loop()
    request = make_request("a", PROMPT, n=3, max_tokens=4)
    loop.add(request)
    assert runs(loop.step()) == [(0, 0, 10)]
    assert runs(loop.step()) == [(0, 10, 1), (1, 8, 2), (2, 8, 2)]
    loop.run()
    assert_as_expected(loop, request)
    assert [loop.results["a", i].num_cached_tokens for i in range(3)] == [0, 8, 8]
    assert loop.scheduler.stats().prompt_tokens == 10


def test_they_wait_through_all_chunks() -> None:
    loop = Loop(max_num_batched_tokens=6)
    loop.add(make_request("a", PROMPT, n=2, max_tokens=4))
    assert runs(loop.step()) == [(0, 0, 6)]
    assert loop.scheduler.stats().num_waiting == 1
    assert runs(loop.step()) == [(0, 6, 4)]
    assert runs(loop.step()) == [(0, 10, 1), (1, 8, 2)]


def test_the_wait_does_not_hold_up_later_requests() -> None:
    loop = Loop(max_num_batched_tokens=12)
    loop.add(make_request("a", PROMPT, n=2), make_request("b", [7, 7]))
    assert runs(loop.step()) == [(0, 0, 10), (2, 0, 2)]


@pytest.mark.parametrize("caching", [True, False])
def test_nothing_to_share_means_no_wait(caching: bool) -> None:
    loop = Loop(enable_prefix_caching=caching)
    request = make_request("a", [1, 2, 3, 4] if caching else PROMPT, n=2)
    loop.add(request)
    assert len(runs(loop.step())) == 2
    loop.run()
    assert_as_expected(loop, request)


def test_output_is_the_same_with_and_without_caching() -> None:
    results = []
    for caching in (True, False):
        loop = Loop(enable_prefix_caching=caching)
        loop.add(make_request("a", PROMPT, n=4, max_tokens=9))
        loop.run()
        results.append([loop.results["a", i].token_ids for i in range(4)])
    assert results[0] == results[1]
    assert len({tuple(tokens) for tokens in results[0]}) == 4


def test_siblings_start_when_the_first_ends_with_its_first_token() -> None:
    loop = Loop()
    request = make_request("a", PROMPT, n=3, max_tokens=1)
    loop.add(request)
    loop.run()
    assert_as_expected(loop, request)


def test_siblings_start_when_the_first_fails() -> None:
    loop = Loop(script=Script(poison=10))
    loop.add(make_request("a", PROMPT, n=2))
    loop.run()
    reasons = [loop.results["a", i].finish_reason for i in range(2)]
    assert reasons == [FinishReason.ERROR] * 2


def test_a_request_with_siblings_that_wait_can_be_aborted() -> None:
    loop = Loop(max_num_batched_tokens=6)
    loop.add(make_request("a", PROMPT, n=3), make_request("b", [1]))
    loop.step()
    ended = loop.scheduler.abort("a")
    assert [seq.index for seq in ended] == [0, 1, 2]
    loop.check()
    assert loop.scheduler.stats().num_waiting == 1
    loop.run()
    assert ("a", 0) not in loop.results
    assert loop.results["b", 0].finish_reason is FinishReason.LENGTH


def test_siblings_wait_for_a_preempted_first() -> None:
    loop = Loop(policy="priority", max_num_seqs=1, max_num_batched_tokens=6)
    request = make_request("a", PROMPT, n=2, priority=1, max_tokens=3)
    loop.add(request)
    loop.step()
    loop.add(make_request("b", [5], max_tokens=2))
    loop.step()
    assert loop.scheduler.stats().num_preemptions == 1
    assert loop.scheduler.stats().num_waiting == 2
    loop.run()
    assert_as_expected(loop, request)
