"""Steps planned before the tokens of earlier ones are known, and drafts in them."""

import pytest
from tests.fakes.fake_mover import FakeMover
from tests.fakes.scripted_runner import Script
from tests.scheduler.loop import Loop, expected, make_request

from moestro.core.grammar import GrammarSpec
from moestro.core.request import FinishReason
from moestro.core.step import SequenceOutput, StepOutput
from moestro.kvcache.tier_policy import TierConfig

ALWAYS = Script(acceptance=1.0)
NEVER = Script(acceptance=0.0)


def planned(loop: Loop) -> list[tuple[int, int, int, int]]:
    """(start, num_tokens, num_draft_tokens, num_next_drafts) of the next step's runs."""
    schedule = loop.plan()
    assert schedule is not None
    return [
        (run.start, run.num_tokens, run.num_draft_tokens, run.num_next_drafts)
        for run in schedule.sequences
    ]


def test_a_step_is_planned_as_if_every_draft_of_the_last_were_accepted() -> None:
    loop = Loop(max_steps_ahead=1, num_drafts=3, script=NEVER)
    loop.add(make_request("a", [1] * 5, max_tokens=40))
    assert planned(loop) == [(0, 5, 0, 3)]
    assert planned(loop) == [(5, 4, 3, 3)]
    with pytest.raises(RuntimeError, match="step 0 has not been updated"):
        loop.plan()
    loop.finish_step(loop.open[0])
    assert planned(loop) == [(9, 4, 3, 3)]
    loop.finish_step(loop.open[0])  # all three were rejected: it starts three earlier
    assert planned(loop) == [(10, 4, 3, 3)]
    (seq,) = loop.scheduler._roster.running
    assert (len(seq.token_ids), seq.num_pending_tokens, seq.num_computed_tokens) == (7, 8, 14)
    assert (seq.num_published_pages, len(loop.open)) == (1, 2)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("script", [ALWAYS, NEVER, Script(acceptance=0.6)])
def test_nothing_passes_the_end(ahead: int, script: Script) -> None:
    loop = Loop(max_steps_ahead=ahead, num_drafts=7, script=script, num_pages=5, max_model_len=18)
    requests = [make_request("a", [1] * 5, max_tokens=6), make_request("b", [2], max_tokens=99)]
    loop.add(*requests)
    loop.run()
    for request in requests:
        want = expected(request, 0, script, loop.max_len)
        got = loop.results[request.request_id, 0]
        assert (got.token_ids, got.finish_reason) == (want.token_ids, FinishReason.LENGTH)
    lasts = [r.start + r.num_tokens for s in loop.runner.schedules for r in s.sequences]
    assert max(lasts) < 18


def test_known_drafts_that_are_fewer_than_asked_for_cost_no_row() -> None:
    loop = Loop(num_drafts=3)
    loop.add(make_request("a", [1] * 5, max_tokens=40))
    schedule = loop.plan()
    assert schedule is not None
    loop.open.clear()
    loop.scheduler.update(schedule, StepOutput(0, (SequenceOutput(0, (7,), draft_token_ids=(8,)),)))
    assert planned(loop) == [(5, 2, 1, 3)]


def test_drafts_give_way_to_tokens() -> None:
    """Four rows and a budget of 8: a quarter is prefill's while one waits, 2 are left to drafts."""
    loop = Loop(num_drafts=3, max_num_batched_tokens=8, max_num_seqs=5, script=ALWAYS)
    for name in "abcd":
        loop.add(make_request(name, [ord(name)], max_tokens=40))
    loop.step()
    assert [run[2] for run in planned(loop)] == [3, 1, 0, 0]
    loop.finish_step(loop.open[0])
    loop.add(make_request("e", [5] * 40, max_tokens=40))
    schedule = loop.plan()
    assert schedule is not None
    assert sum(run.num_draft_tokens for run in schedule.sequences) == 2
    assert schedule.sequences[-1].num_tokens == 2


def test_drafts_give_way_to_pages_of_others() -> None:
    """Both need a page for their next token and two are left: none goes to drafts alone."""
    loop = Loop(num_drafts=9, num_pages=4, script=ALWAYS)
    loop.add(make_request("a", [1] * 4, max_tokens=9), make_request("b", [2] * 4, max_tokens=9))
    first = loop.step()
    assert first is not None
    assert [run.num_next_drafts for run in first.sequences] == [1, 1]
    schedule = loop.plan()
    assert schedule is not None
    assert [len(run.new_pages) for run in schedule.sequences] == [1, 1]
    assert all(run.num_next_drafts == 4 - run.num_draft_tokens for run in schedule.sequences)
    loop.run()
    assert loop.scheduler.stats().num_preemptions <= 1


def test_with_a_grammar_the_next_step_waits_for_the_last_token() -> None:
    loop = Loop(max_steps_ahead=1, num_drafts=2)
    spec = GrammarSpec("scripted", "10|11 20|21 30 31 32")
    loop.add(make_request("a", [1], max_tokens=9, grammar=spec))
    loop.add(make_request("b", [2], max_tokens=9))
    first = loop.plan()
    assert loop.plan() is None
    assert first is not None
    loop.finish_step(first)
    second = loop.plan()
    assert second is not None
    masks = second.sequences[0].allowed_tokens
    assert masks is not None
    assert len(masks) == 1 + second.sequences[0].num_draft_tokens
    loop.run()
    assert loop.results["a", 0].token_ids[2:] == [30, 31, 32]


def test_a_draft_that_the_grammar_refuses_is_not_verified() -> None:
    loop = Loop(num_drafts=3)
    loop.add(make_request("a", [1], grammar=GrammarSpec("scripted", "10 20|21 30 40")))
    schedule = loop.plan()
    assert schedule is not None
    loop.open.clear()
    output = SequenceOutput(0, (10,), draft_token_ids=(21, 31, 40))
    loop.scheduler.update(schedule, StepOutput(0, (output,)))
    second = loop.plan()
    assert second is not None
    run = second.sequences[0]
    assert (run.num_tokens, run.num_draft_tokens) == (2, 1)
    assert run.allowed_tokens == (
        (1 << 20 | 1 << 21).to_bytes(7, "little"),
        (1 << 30).to_bytes(7, "little"),
    )
    (seq,) = loop.scheduler._roster.running
    assert seq.matcher.accepted == [10]  # type: ignore[union-attr]


def test_a_preempted_sequence_keeps_what_its_step_in_flight_says() -> None:
    loop = Loop(max_steps_ahead=1, num_pages=4)
    requests = [make_request("a", [1] * 7, max_tokens=9), make_request("b", [2] * 7, max_tokens=9)]
    loop.add(*requests)
    loop.plan()
    loop.plan()
    while not loop.scheduler.stats().num_preemptions:
        loop.finish_step(loop.open[0])
        loop.plan()
    waiting = loop.scheduler._roster.queue.peek()
    assert waiting is not None
    assert (waiting.num_runs_in_flight, waiting.pages) == (1, [])
    num_before = len(waiting.token_ids)
    loop.finish_step(loop.open[0])
    assert (len(waiting.token_ids), waiting.num_published_pages) == (num_before + 1, 0)
    loop.run()
    for request in requests:
        want = expected(request, 0, loop.runner.script, loop.max_len)
        assert loop.results[request.request_id, 0].token_ids == want.token_ids


def test_failures_found_ahead_are_told_with_their_own_step() -> None:
    loop = Loop(max_steps_ahead=1)
    loop.add(make_request("a", [1], max_tokens=5))
    first = loop.plan()
    loop.add(make_request("b", [2], grammar=GrammarSpec("scripted", "!10")))
    second = loop.plan()
    assert first is not None
    assert second is not None
    assert [u.request_id for u in loop.finish_step(first)] == ["a"]
    assert [u.request_id for u in loop.finish_step(second)] == ["b", "a"]
    assert loop.results["b", 0].finish_reason is FinishReason.ERROR


def test_steps_without_loads_end_no_load_of_a_later_step() -> None:
    """The slots of a load in flight stay its own until its own step's output is there."""
    mover = FakeMover(has_store=False)
    loop = Loop(mover=mover, tiers=TierConfig(num_host_slots=20), max_steps_ahead=1, num_pages=8)
    for request in (
        make_request("a", [1] * 13, max_tokens=1),
        make_request("b", list(range(30)), max_tokens=3),  # its pages take the place of a's
    ):
        loop.add(request)
        loop.run()
        while loop.scheduler.tend() or mover.queued:
            mover.finish_all()
    loop.add(make_request("c", [3], max_tokens=9))
    loop.plan()
    loop.add(make_request("d", [1] * 13, max_tokens=1))
    loading = loop.plan()
    assert loading is not None
    assert loading.loads
    loop.finish_step(loop.open[0])
    (claim,) = loop.kv._below._open_steps
    assert sum(run.num_pages for run in claim.runs) == len(loading.loads[0].pages)
    loop.run()
    assert not loop.kv._below._open_steps
