"""Continuous batching, rule by rule."""

import pytest
from tests.fakes.scripted_runner import Script
from tests.scheduler.loop import Loop, expected, make_request

from moestro.core.request import FinishReason, Request
from moestro.core.step import Schedule, SequenceOutput, StepOutput
from moestro.errors import CapacityError, RequestError


def assert_as_expected(loop: Loop, *requests: Request) -> None:
    """Every sequence of the requests gave what it gives alone."""
    for request in requests:
        for index in range(request.params.n):
            want = expected(request, index, loop.runner.script, loop.max_len)
            got = loop.results[request.request_id, index]
            assert (got.token_ids, got.finish_reason, got.stop_reason) == (
                want.token_ids,
                want.finish_reason,
                want.stop_reason,
            )


def runs(schedule: Schedule | None) -> list[tuple[int, int, int]]:
    """(seq_id, start, num_tokens) of each run."""
    assert schedule is not None
    return [(r.seq_id, r.start, r.num_tokens) for r in schedule.sequences]


def test_nothing_to_do() -> None:
    loop = Loop()
    assert not loop.scheduler.has_work()
    assert loop.plan() is None


def test_one_request_from_prompt_to_max_tokens() -> None:
    loop = Loop()
    request = make_request("a", [1, 2, 3], max_tokens=3)
    loop.add(request)
    assert loop.scheduler.has_work()
    assert [runs(loop.step()) for _ in range(3)] == [[(0, 0, 3)], [(0, 3, 1)], [(0, 4, 1)]]
    assert not loop.scheduler.has_work()
    assert_as_expected(loop, request)


def test_new_sequences_say_what_the_runner_must_know() -> None:
    loop = Loop()
    request = make_request("a", [1, 2], seed=9, stop_token_ids=(4,), eos_token_ids=(3,))
    loop.add(request)
    schedule = loop.plan()
    assert schedule is not None
    (new,) = schedule.new_sequences
    assert (new.seq_id, new.token_ids, new.num_prompt_tokens) == (0, (1, 2), 2)
    assert (new.params, new.seed, new.sample_index) == (request.params, 9, 0)
    assert new.stop_token_ids == {3, 4}
    assert new.prompt_logprobs_from is None
    (run,) = schedule.sequences
    assert (run.new_pages, run.samples, run.allowed_tokens) == ((0,), True, None)


def test_a_long_prompt_is_computed_in_chunks() -> None:
    loop = Loop(max_num_batched_tokens=4)
    loop.add(make_request("a", list(range(10)), max_tokens=1))
    schedules = [loop.step() for _ in range(3)]
    assert [runs(s) for s in schedules] == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 2)]]
    assert [s.sequences[0].samples for s in schedules if s] == [False, False, True]
    assert len(loop.results["a", 0].token_ids) == 1


def test_decode_goes_first_and_prompts_fill_the_rest_of_the_budget() -> None:
    loop = Loop(max_num_batched_tokens=8)
    loop.add(make_request("a", [1], max_tokens=20), make_request("b", [2], max_tokens=20))
    loop.step()
    loop.add(make_request("c", [3] * 9), make_request("d", [4] * 9))
    assert runs(loop.step()) == [(0, 1, 1), (1, 1, 1), (2, 0, 6)]
    assert runs(loop.step()) == [(0, 2, 1), (1, 2, 1), (2, 6, 3), (3, 0, 3)]
    assert runs(loop.step()) == [(0, 3, 1), (1, 3, 1), (2, 9, 1), (3, 3, 5)]


def test_no_more_than_max_num_seqs_run() -> None:
    loop = Loop(max_num_seqs=2)
    loop.add(*(make_request(str(i), [i], max_tokens=2) for i in range(5)))
    loop.step()
    stats = loop.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 3)
    assert loop.run() == 5


def test_decode_rows_take_turns_when_the_budget_is_smaller() -> None:
    loop = Loop(max_num_batched_tokens=3, max_num_seqs=5)
    loop.add(*(make_request(str(i), [i], max_tokens=50) for i in range(5)))
    while any(not result for result in [loop.results[str(i), 0].token_ids for i in range(5)]):
        loop.step()
    before = [len(loop.results[str(i), 0].token_ids) for i in range(5)]
    for _ in range(10):
        schedule = loop.step()
        assert schedule is not None
        assert schedule.num_tokens == 3
    after = [len(loop.results[str(i), 0].token_ids) for i in range(5)]
    assert [a - b for a, b in zip(after, before, strict=True)] == [6] * 5


def test_a_prompt_advances_under_decodes_that_fill_every_step() -> None:
    loop = Loop(max_num_batched_tokens=4, max_num_seqs=8)
    loop.add(*(make_request(str(i), [i], max_tokens=60) for i in range(6)))
    for _ in range(4):
        loop.step()
    loop.add(make_request("late", [7] * 10, max_tokens=1))
    for _ in range(12):
        loop.step()
    assert loop.results["late", 0].finish_reason is FinishReason.LENGTH


def test_what_prompts_can_not_use_goes_back_to_decode() -> None:
    loop = Loop(max_num_batched_tokens=4, max_num_seqs=8, num_pages=8, page_size=16)
    loop.add(*(make_request(str(i), [i], max_tokens=14) for i in range(6)))
    for _ in range(3):
        loop.step()
    loop.add(make_request("too big for now", [7] * 40, max_tokens=1))
    for _ in range(8):
        schedule = loop.step()
        assert schedule is not None
        assert schedule.num_tokens == 4
        assert not schedule.new_sequences
    loop.run()


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_even_a_tiny_budget_serves_all(budget: int) -> None:
    loop = Loop(max_num_batched_tokens=budget)
    requests = [make_request(str(i), [i] * (3 * i + 1), max_tokens=4) for i in range(6)]
    loop.add(*requests)
    loop.run(200)
    assert_as_expected(loop, *requests)


def test_a_second_request_shares_the_prefix_of_the_first() -> None:
    loop = Loop()
    prompt = list(range(1, 11))
    first = make_request("a", prompt, max_tokens=2)
    loop.add(first)
    loop.run()
    again = make_request("b", prompt, max_tokens=2)
    loop.add(again)
    schedule = loop.step()
    assert runs(schedule) == [(1, 8, 2)]
    assert loop.results["b", 0].num_cached_tokens == 8
    loop.run()
    assert loop.results["b", 0].token_ids == loop.results["a", 0].token_ids
    stats = loop.scheduler.stats()
    assert (stats.prefix_queries_tokens, stats.prefix_hits_tokens) == (20, 8)
    assert (stats.prompt_tokens, stats.generation_tokens) == (20, 4)


def test_output_is_found_as_prefix_of_the_next_turn() -> None:
    loop = Loop()
    loop.add(make_request("a", [1, 2, 3], max_tokens=10))
    loop.run()
    turn = [1, 2, 3, *loop.results["a", 0].token_ids, 4]
    loop.add(make_request("b", turn, max_tokens=1))
    loop.run()
    assert loop.results["b", 0].num_cached_tokens == 12


def test_released_sequences_are_told_with_the_next_step() -> None:
    loop = Loop()
    loop.add(make_request("a", [1], max_tokens=1), make_request("b", [2], max_tokens=3))
    loop.step()
    schedule = loop.step()
    assert schedule is not None
    assert schedule.released == (0,)
    assert loop.runner.known_sequences == {1}


def test_several_tokens_a_sample() -> None:
    loop = Loop(script=Script(max_burst=4), num_pages=6)
    requests = [
        make_request("a", [1] * 5, max_tokens=7, logprobs=1),
        make_request("b", [2], max_tokens=12, stop_token_ids=tuple(range(10)), logprobs=1),
    ]
    loop.add(*requests)
    loop.run()
    assert_as_expected(loop, *requests)
    for result in loop.results.values():
        assert len(result.logprobs) == len(result.token_ids)


def test_a_runner_error_ends_that_sequence_only() -> None:
    loop = Loop(script=Script(poison=49), num_pages=8)
    bad = make_request("bad", [1, 2, 3, 4, 49, 5, 6, 7])
    good = make_request("good", [1, 2, 3, 4, 5])
    loop.add(bad, good)
    loop.run()
    result = loop.results["bad", 0]
    assert (result.finish_reason, result.error) == (FinishReason.ERROR, "non-finite logits")
    assert result.token_ids == []
    assert_as_expected(loop, good)
    # Nothing that the failing step computed is offered to others.
    loop.add(make_request("again", [1, 2, 3, 4, 49, 5, 6, 7]))
    loop.run()
    assert loop.results["again", 0].num_cached_tokens <= 4


def test_stats_after_a_step() -> None:
    loop = Loop(num_pages=16, max_num_batched_tokens=6)
    loop.add(make_request("a", [1] * 5), make_request("b", [2] * 5))
    loop.step()
    stats = loop.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (2, 0, 1)
    assert (stats.num_pages, stats.num_pages_used, stats.last_step_tokens) == (16, 4, 6)
    assert (stats.prompt_tokens, stats.generation_tokens) == (5, 1)


@pytest.mark.parametrize(
    ("prompt", "error", "why"),
    [
        ([], RequestError, "empty"),
        ([1] * 200, RequestError, "200 tokens; the context of 200"),
        ([1] * 65, CapacityError, "65 tokens, the KV memory holds 64"),
        ([1, 2, 3, -1], RequestError, "in \\[0, 2\\^32\\)"),
        ([1, 2, 3, 1 << 32], RequestError, "in \\[0, 2\\^32\\)"),
    ],
)
def test_what_can_not_run_is_refused_at_once(
    prompt: list[int], error: type[Exception], why: str
) -> None:
    loop = Loop(num_pages=16, max_model_len=200)
    with pytest.raises(error, match=why):
        loop.add(make_request("a", prompt))
    assert not loop.scheduler.has_work()
    loop.add(make_request("a", [1] * 64, max_tokens=100))  # the id is still free, and this fits
    loop.run()
    assert len(loop.results["a", 0].token_ids) == 1


def test_a_live_request_id_can_not_be_used_twice() -> None:
    loop = Loop()
    loop.add(make_request("a", [1], max_tokens=1))
    with pytest.raises(RequestError, match="'a' is in use"):
        loop.add(make_request("a", [2]))
    loop.run()
    loop.results.clear()
    loop.add(make_request("a", [2], max_tokens=1))
    loop.run()


def test_one_step_at_a_time() -> None:
    loop = Loop()
    loop.add(make_request("a", [1]))
    schedule = loop.plan()
    assert schedule is not None
    with pytest.raises(RuntimeError, match="step 0 has not been updated"):
        loop.plan()
    output = loop.runner.execute(schedule)
    with pytest.raises(ValueError, match="step 0 is the oldest in flight"):
        loop.scheduler.update(schedule, StepOutput(7, output.sequences))
    with pytest.raises(ValueError, match="output of sequence 5 in place of 0"):
        loop.scheduler.update(schedule, StepOutput(0, (SequenceOutput(5),)))


def test_the_same_submissions_give_the_same_schedules() -> None:
    def record() -> list[Schedule]:
        loop = Loop(num_pages=10, max_num_batched_tokens=5, policy="priority")
        for i in range(14):
            prompt = [1, 2, 3, 4, 5, i, i, i][: 3 + i % 6]
            loop.add(make_request(str(i), prompt, n=1 + i % 3, priority=i % 2, seed=i))
            loop.step()
            if i == 9:
                loop.scheduler.abort("6")
        loop.run()
        assert loop.scheduler.stats().num_preemptions > 0
        return loop.runner.schedules

    assert record() == record()
