"""Requests that want the prompt scored: every position once, whatever happens in between."""

import pytest
from tests.scheduler.loop import Loop, make_request

PROMPT = list(range(1, 11))


def scores(**options: object) -> list[int]:
    """Prompt tokens scored, in order of delivery, for PROMPT in a loop with these options."""
    loop = Loop(**options)  # type: ignore[arg-type]
    loop.add(make_request("a", PROMPT, prompt_logprobs=0, max_tokens=2))
    loop.run()
    return [entry.token_ids[0] for entry in loop.results["a", 0].prompt_logprobs]


@pytest.mark.parametrize("budget", [1, 3, 4, 32])
def test_every_position_but_the_first_is_scored_once(budget: int) -> None:
    assert scores(max_num_batched_tokens=budget) == PROMPT[1:]


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    loop = Loop()
    loop.add(make_request("a", [1], prompt_logprobs=0, max_tokens=2))
    loop.run()
    assert loop.results["a", 0].prompt_logprobs == []


def test_nothing_is_read_from_the_prefix_cache_but_pages_are_published() -> None:
    loop = Loop()
    loop.add(make_request("warm", PROMPT, max_tokens=1))
    loop.run()
    loop.add(make_request("a", PROMPT, prompt_logprobs=0, max_tokens=1))
    loop.run()
    assert loop.results["a", 0].num_cached_tokens == 0
    assert len(loop.results["a", 0].prompt_logprobs) == 9
    stats = loop.scheduler.stats()
    assert (stats.prefix_queries_tokens, stats.prefix_hits_tokens) == (10, 0)

    loop = Loop()
    loop.add(make_request("a", PROMPT, prompt_logprobs=0, max_tokens=1))
    loop.run()
    loop.add(make_request("after", PROMPT, max_tokens=1))
    loop.run()
    assert loop.results["after", 0].num_cached_tokens == 8


def test_after_preemption_only_the_rest_is_wanted() -> None:
    loop = Loop(policy="priority", max_num_seqs=1, max_num_batched_tokens=4)
    loop.add(make_request("a", PROMPT, prompt_logprobs=0, priority=1, max_tokens=2))
    loop.step()
    loop.add(make_request("b", [1], max_tokens=1))
    loop.run()
    new = [n for s in loop.runner.schedules for n in s.new_sequences if n.seq_id == 0]
    assert [n.prompt_logprobs_from for n in new] == [0, 5]
    delivered = [entry.token_ids[0] for entry in loop.results["a", 0].prompt_logprobs]
    assert delivered == PROMPT[1:]
    starts = [r.start for s in loop.runner.schedules for r in s.sequences if r.seq_id == 0]
    assert starts.count(0) == 2


def test_when_all_are_delivered_none_is_wanted_any_more() -> None:
    loop = Loop(num_pages=4)
    loop.add(
        make_request("a", [1] * 8, max_tokens=8),
        make_request("b", [2] * 8, max_tokens=8, prompt_logprobs=0),
    )
    loop.run()
    assert loop.scheduler.stats().num_preemptions > 0
    new = [n for s in loop.runner.schedules for n in s.new_sequences if n.seq_id == 1]
    assert [n.prompt_logprobs_from for n in new][:2] == [0, None]
    assert len(loop.results["b", 0].prompt_logprobs) == 7


def test_the_first_of_n_scores_for_all_and_the_others_share_its_pages() -> None:
    loop = Loop()
    loop.add(make_request("a", PROMPT, prompt_logprobs=0, n=3, max_tokens=2))
    loop.run()
    assert [len(loop.results["a", i].prompt_logprobs) for i in range(3)] == [9, 0, 0]
    assert [loop.results["a", i].num_cached_tokens for i in range(3)] == [0, 8, 8]
