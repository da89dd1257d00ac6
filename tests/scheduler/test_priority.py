"""Policy `priority`: lower values first, at admission and when somebody must give way."""

from tests.scheduler.loop import Loop, make_request
from tests.scheduler.test_scheduler import assert_as_expected

from moestro.core.request import Request


def urgent(name: str, prompt: list[int], priority: int, max_tokens: int = 4) -> Request:
    return make_request(name, prompt, priority=priority, max_tokens=max_tokens)


def admissions(loop: Loop) -> list[int]:
    return [new.seq_id for s in loop.runner.schedules for new in s.new_sequences]


def test_waiting_ones_are_admitted_by_priority_then_in_order() -> None:
    loop = Loop(policy="priority", max_num_seqs=1)
    for i, priority in enumerate((5, 0, -1, 0)):
        loop.add(urgent(str(i), [i], priority))
    loop.run()
    assert admissions(loop) == [2, 1, 3, 0]


def test_fcfs_does_not_look_at_it() -> None:
    loop = Loop(policy="fcfs", max_num_seqs=1)
    for i, priority in enumerate((5, 0, -1)):
        loop.add(urgent(str(i), [i], priority))
    loop.run()
    assert admissions(loop) == [0, 1, 2]


def test_an_urgent_one_takes_the_slot_of_a_less_urgent_one() -> None:
    loop = Loop(policy="priority", max_num_seqs=2)
    requests = [urgent("low", [1], 5, 20), urgent("mid", [2], 3, 20)]
    loop.add(*requests)
    loop.step()
    requests.append(urgent("high", [3], 0, 2))
    loop.add(requests[-1])
    schedule = loop.step()
    assert schedule is not None
    assert schedule.released == (0,)
    assert [new.seq_id for new in schedule.new_sequences] == [2]
    loop.run()
    assert_as_expected(loop, *requests)
    assert admissions(loop) == [1, 0, 2, 0]


def test_an_urgent_one_takes_the_pages_of_less_urgent_ones() -> None:
    loop = Loop(policy="priority", num_pages=6)
    requests = [urgent(str(i), [i] * 7, 5) for i in range(3)]
    loop.add(*requests)
    loop.step()
    requests.append(urgent("high", [9] * 15, 0))
    loop.add(requests[-1])
    schedule = loop.step()
    assert schedule is not None
    assert schedule.released == (2, 1)
    assert [new.seq_id for new in schedule.new_sequences] == [3]
    loop.run()
    assert_as_expected(loop, *requests)


def test_nobody_is_preempted_when_it_would_not_help() -> None:
    loop = Loop(policy="priority", num_pages=6)
    loop.add(urgent("high", [1] * 13, 0, 8), urgent("low", [2] * 7, 5))
    loop.step()
    loop.add(urgent("mid", [3] * 20, 1))
    for _ in range(2):
        loop.step()
        assert loop.scheduler.stats().num_preemptions == 0
    loop.run()


def test_equals_do_not_preempt_each_other_for_admission() -> None:
    loop = Loop(policy="priority", max_num_seqs=1)
    loop.add(urgent("a", [1], 1))
    loop.step()
    loop.add(urgent("b", [2], 1))
    loop.run()
    assert loop.scheduler.stats().num_preemptions == 0


def test_the_least_urgent_gives_way_even_if_it_came_first() -> None:
    loop = Loop(policy="priority", num_pages=4)
    requests = [urgent("low", [1] * 8, 5), urgent("high", [2] * 8, 0)]
    loop.add(*requests)
    loop.step()
    schedule = loop.step()
    assert schedule is not None
    assert schedule.released == (0,)
    loop.run()
    assert_as_expected(loop, *requests)


def test_decode_order_is_by_priority() -> None:
    loop = Loop(policy="priority")
    loop.add(urgent("low", [1], 5), urgent("high", [2], 0))
    loop.step()
    schedule = loop.step()
    assert schedule is not None
    assert [run.seq_id for run in schedule.sequences] == [1, 0]
