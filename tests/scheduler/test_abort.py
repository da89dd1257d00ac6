"""abort and finish, at any moment."""

from tests.scheduler.loop import Loop, make_request
from tests.scheduler.test_scheduler import assert_as_expected

from moestro.core.request import FinishReason, SequenceStatus


def test_an_unknown_request_is_ignored() -> None:
    loop = Loop()
    assert loop.scheduler.abort("nobody") == []
    loop.scheduler.finish(3, FinishReason.STOP, "x", 0)


def test_waiting() -> None:
    loop = Loop(max_num_seqs=1)
    loop.add(make_request("a", [1], max_tokens=3), make_request("b", [2]))
    loop.step()
    (seq,) = loop.scheduler.abort("b")
    assert seq.status is SequenceStatus.FINISHED
    assert seq.finish_reason is FinishReason.ABORT
    loop.check()
    loop.run()
    assert [new.seq_id for s in loop.runner.schedules for new in s.new_sequences] == [0]


def test_in_the_middle_of_its_prompt() -> None:
    loop = Loop(max_num_batched_tokens=6)
    loop.add(make_request("a", [1] * 10), make_request("b", [2], max_tokens=2))
    loop.step()
    loop.scheduler.abort("a")
    loop.check()
    schedule = loop.step()
    assert schedule is not None
    assert schedule.released == (0,)
    loop.run()
    assert loop.scheduler.stats().num_pages_used == 0


def test_decoding() -> None:
    loop = Loop()
    other = make_request("b", [2])
    loop.add(make_request("a", [1], max_tokens=50), other)
    loop.step()
    loop.step()
    loop.scheduler.abort("a")
    loop.run()
    assert len(loop.results["a", 0].token_ids) == 2
    assert loop.results["a", 0].finish_reason is None
    assert_as_expected(loop, other)


def test_preempted() -> None:
    loop = Loop(num_pages=4)
    loop.add(make_request("a", [1] * 8), make_request("b", [2] * 8))
    loop.step()
    loop.step()
    (seq,) = loop.scheduler.abort("b")
    assert seq.num_preemptions == 1
    loop.run()
    assert sum(s.released.count(1) for s in loop.runner.schedules) == 1


def test_while_its_step_is_in_flight() -> None:
    loop = Loop()
    other = make_request("b", [2])
    loop.add(make_request("a", [1]), other)
    schedule = loop.plan()
    assert schedule is not None
    loop.scheduler.abort("a")
    updates = loop.finish_step(schedule)
    assert [update.request_id for update in updates] == ["b"]
    schedule = loop.step()
    assert schedule is not None
    assert schedule.released == (0,)
    loop.run()
    assert_as_expected(loop, other)


def test_everything_at_once() -> None:
    loop = Loop()
    loop.add(*(make_request(str(i), [i] * 9, n=2) for i in range(5)))
    loop.step()
    for i in range(5):
        loop.scheduler.abort(str(i))
    loop.check()
    assert not loop.scheduler.has_work()
    assert loop.plan() is None
    assert loop.scheduler.stats().num_pages_used == 0


def test_the_id_of_an_aborted_request_may_be_used_again() -> None:
    loop = Loop()
    loop.add(make_request("a", [1]))
    loop.step()
    loop.scheduler.abort("a")
    loop.results.clear()
    again = make_request("a", [2])
    loop.add(again)
    loop.run()
    assert_as_expected(loop, again)


def test_finish_cuts_the_output_and_frees_the_pages() -> None:
    loop = Loop()
    (seq,) = loop.scheduler.add(make_request("a", [1, 2, 3], max_tokens=50))
    for _ in range(6):
        loop.step()
    loop.scheduler.finish(seq.seq_id, FinishReason.STOP, "\n", 4)
    assert (seq.finish_reason, seq.stop_reason) == (FinishReason.STOP, "\n")
    assert seq.token_ids == [1, 2, 3, *loop.results["a", 0].token_ids[:4]]
    loop.check()
    assert not loop.scheduler.has_work()
    assert loop.scheduler.stats().num_pages_used == 0


def test_finishing_the_first_sibling_does_not_end_the_others() -> None:
    loop = Loop()
    request = make_request("a", [1] * 5, n=2, max_tokens=4)
    first, second = loop.scheduler.add(request)
    loop.step()
    loop.scheduler.finish(first.seq_id, FinishReason.STOP, "x", 1)
    loop.run()
    assert second.finish_reason is FinishReason.LENGTH
    assert len(loop.results["a", 1].token_ids) == 4


def test_finish_after_the_end_changes_nothing() -> None:
    loop = Loop()
    (seq,) = loop.scheduler.add(make_request("a", [1], max_tokens=2))
    loop.run()
    loop.scheduler.finish(seq.seq_id, FinishReason.STOP, "x", 0)
    assert seq.finish_reason is FinishReason.LENGTH
    assert seq.num_output_tokens == 2
