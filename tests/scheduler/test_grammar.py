"""Constrained sequences: masks go out, tokens come back, failures stay with their sequence."""

import pytest
from tests.fakes.scripted_runner import Script
from tests.scheduler.loop import Loop, Result, make_request

from moestro.core.grammar import GrammarSpec
from moestro.core.request import FinishReason, Request
from moestro.core.step import SequenceOutput, StepOutput
from moestro.errors import RequestError
from moestro.kvcache import KVCacheManager
from moestro.scheduler import Scheduler, SchedulerLimits

EOS = 3


def scripted(name: str, source: str, **params: object) -> Request:
    options: dict = {"max_tokens": 12, "eos_token_ids": (EOS,), **params}
    return make_request(name, [1, 2], grammar=GrammarSpec("scripted", source), **options)


def outcome(loop: Loop, name: str) -> Result:
    loop.run()
    return loop.results[name, 0]


def test_tokens_follow_the_grammar_and_a_stop_token_ends_it() -> None:
    loop = Loop()
    loop.add(scripted("a", "10 20|21 30"))
    result = outcome(loop, "a")
    assert result.token_ids[0] == 10
    assert result.token_ids[1] in (20, 21)
    assert result.token_ids[2:] == [30, EOS]
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, None)


def test_the_mask_is_on_sampling_runs_only() -> None:
    loop = Loop(max_num_batched_tokens=1)
    loop.add(scripted("a", "10"))
    schedules = [loop.step(), loop.step(), loop.step()]
    masks = [s.sequences[0].allowed_tokens for s in schedules if s]
    assert masks[0] is None
    assert masks[1] == ((1 << 10).to_bytes(7, "little"),)
    assert masks[2] == ((1 << EOS).to_bytes(7, "little"),)


def test_a_finished_grammar_without_stop_tokens_ends_by_itself() -> None:
    loop = Loop()
    loop.add(scripted("a", "10 20", eos_token_ids=()))
    result = outcome(loop, "a")
    assert result.token_ids == [10, 20]
    assert result.finish_reason is FinishReason.STOP


def test_a_finished_grammar_ends_before_min_tokens_could_be_reached() -> None:
    loop = Loop()
    loop.add(scripted("a", "10 20", min_tokens=5))
    assert outcome(loop, "a").token_ids == [10, 20]


def test_a_grammar_that_only_allows_what_min_tokens_forbids_is_an_error() -> None:
    loop = Loop()
    loop.add(scripted("a", "10 20|21", min_tokens=5, stop_token_ids=(20, 21)))
    result = outcome(loop, "a")
    assert result.token_ids == [10]
    assert "min_tokens=5 forbids" in str(result.error)


def test_length_cuts_a_grammar() -> None:
    loop = Loop()
    loop.add(scripted("a", "10 20 30", max_tokens=2))
    result = outcome(loop, "a")
    assert (result.token_ids, result.finish_reason) == ([10, 20], FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("source", "tokens", "why"),
    [
        ("10 !20", [10], "matcher failed: ValueError.*scripted failure at 1"),
        ("!10", [], "scripted failure at 0"),
        ("10 -20 30", [10], "refused the sampled token 20"),
        ("60", [], "Token 60 is beyond the vocabulary"),
    ],
)
def test_a_failing_matcher_ends_its_own_sequence_only(
    source: str, tokens: list[int], why: str
) -> None:
    loop = Loop()
    other = make_request("b", [5, 6], max_tokens=6)
    loop.add(scripted("a", source), other)
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(outcome(loop, "a").error)
    assert loop.results["a", 0].finish_reason is FinishReason.ERROR
    assert loop.results["a", 0].token_ids == tokens
    assert len(loop.results["b", 0].token_ids) == 6
    assert loop.scheduler.stats().num_pages_used == 0


def test_a_failure_is_told_even_when_nothing_else_runs() -> None:
    loop = Loop()
    loop.add(scripted("a", "!10"))
    schedule = loop.step()
    assert schedule is not None
    assert schedule.sequences == schedule.new_sequences == ()
    assert loop.scheduler.stats().last_step_tokens == 0
    assert loop.results["a", 0].finish_reason is FinishReason.ERROR
    assert not loop.scheduler.has_work()
    loop.add(make_request("b", [1], max_tokens=1))
    loop.run()
    assert all(not s.released for s in loop.runner.schedules)


def test_a_mask_that_allows_nothing_is_an_error() -> None:
    loop = Loop()
    loop.add(scripted("a", "", eos_token_ids=()))
    error = outcome(loop, "a").error
    assert error == "The grammar allows no token here."


def test_an_exception_from_accept_or_is_done_is_caught() -> None:
    for broken in ("accept", "is_done"):
        loop = Loop()
        (seq,) = loop.scheduler.add(scripted("a", "10 20", eos_token_ids=()))
        schedule = loop.plan()
        assert schedule is not None
        setattr(seq.matcher, broken, lambda *_: 1 / 0)
        loop.finish_step(schedule)
        result = loop.results["a", 0]
        assert result.finish_reason is FinishReason.ERROR
        assert "ZeroDivisionError" in str(result.error)


def test_a_refused_token_is_not_part_of_the_output() -> None:
    loop = Loop()
    (seq,) = loop.scheduler.add(scripted("a", "10 20"))
    schedule = loop.plan()
    assert schedule is not None
    loop.runner.execute(schedule)
    (update,) = loop.scheduler.update(schedule, StepOutput(0, (SequenceOutput(0, (11,)),)))
    assert (update.new_token_ids, update.finish_reason) == ((), FinishReason.ERROR)
    assert seq.token_ids == [1, 2]


def test_the_matcher_survives_preemption() -> None:
    loop = Loop(num_pages=4, script=Script(vocab_size=50))
    blocker = make_request("a", [4] * 8, max_tokens=8)
    source = " ".join(str(i) for i in range(10, 18))
    constrained = make_request("b", [5] * 8, max_tokens=8, grammar=GrammarSpec("scripted", source))
    loop.add(blocker, constrained)
    loop.run()
    assert loop.scheduler.stats().num_preemptions > 0
    assert loop.results["b", 0].token_ids == list(range(10, 18))


def test_each_sibling_has_its_own_matcher() -> None:
    loop = Loop()
    loop.add(scripted("a", "10|11|12|13 20|21|22|23", n=4))
    loop.run()
    assert all(len(loop.results["a", i].token_ids) == 3 for i in range(4))
    assert len({tuple(loop.results["a", i].token_ids) for i in range(4)}) > 1


def test_grammar_without_a_compiler_is_refused() -> None:
    scheduler = Scheduler(SchedulerLimits(4, 16, 100), KVCacheManager(8, 4), "fcfs", None, 50)
    with pytest.raises(RequestError, match="no grammar support, got a scripted grammar"):
        scheduler.add(scripted("a", "10"))
