"""Roster: sequences move between its lists, and the runner is told once."""

from tests.scheduler.loop import make_request

from moestro.core.request import FinishReason, Sequence, SequenceStatus
from moestro.kvcache import KVCacheManager
from moestro.scheduler.policy import sort_key_of
from moestro.scheduler.roster import Roster


def make_roster(n: int, *, hold: bool) -> tuple[Roster, list[Sequence]]:
    """A request "a" with n sequences that wait, all but the first held back if `hold`."""
    roster = Roster(KVCacheManager(8, 4), sort_key_of("fcfs"))
    request = make_request("a", [1, 2], n=n)
    sequences = [Sequence(i, request, i, [1, 2]) for i in range(n)]
    roster.add(request, sequences, hold_siblings=hold)
    return roster, sequences


def test_a_life() -> None:
    roster, (seq,) = make_roster(1, hold=False)
    assert (roster.num_waiting, roster.running) == (1, [])
    roster.start(seq)
    roster.introduce(seq.seq_id)
    assert (roster.num_waiting, roster.running, seq.status) == (0, [seq], SequenceStatus.RUNNING)
    roster.preempt(seq)
    assert (roster.num_waiting, roster.num_preemptions) == (1, 1)
    assert seq.status is SequenceStatus.PREEMPTED
    assert roster.take_released() == (0,)
    assert roster.take_released() == ()
    roster.start(seq)
    roster.introduce(seq.seq_id)
    roster.end(seq, FinishReason.STOP, 7)
    assert (seq.status, seq.finish_reason, seq.stop_reason) == (SequenceStatus.FINISHED, "stop", 7)
    assert (roster.live, roster.of_request("a"), roster.num_waiting) == ({}, [], 0)
    assert roster.take_released() == (0,)


def test_what_the_runner_never_saw_is_not_released() -> None:
    roster, (seq,) = make_roster(1, hold=False)
    roster.start(seq)
    roster.end(seq, FinishReason.ERROR, None)
    assert roster.take_released() == ()


def test_preempted_and_ended_before_it_was_introduced_again_is_released_once() -> None:
    roster, (seq,) = make_roster(1, hold=False)
    roster.start(seq)
    roster.introduce(seq.seq_id)
    roster.preempt(seq)
    roster.start(seq)
    roster.end(seq, FinishReason.ERROR, None)
    assert roster.take_released() == (0,)


def test_held_siblings_count_as_waiting_and_come_in_together() -> None:
    roster, sequences = make_roster(3, hold=True)
    assert (roster.num_waiting, len(roster.queue)) == (3, 1)
    roster.let_siblings_in(sequences[0])
    assert (roster.num_waiting, len(roster.queue)) == (3, 3)
    roster.let_siblings_in(sequences[0])
    assert roster.num_waiting == 3


def test_a_held_sibling_can_end() -> None:
    roster, sequences = make_roster(3, hold=True)
    roster.end(sequences[1], FinishReason.ABORT, None)
    assert (roster.num_waiting, roster.of_request("a")) == (2, [sequences[0], sequences[2]])
    roster.end(sequences[0], FinishReason.ABORT, None)
    assert (roster.num_waiting, roster.queue.peek()) == (1, sequences[2])


def test_running_ones_are_kept_in_order() -> None:
    roster, sequences = make_roster(3, hold=False)
    for seq in sequences:
        roster.start(seq)
    roster.preempt(sequences[1])
    roster.start(sequences[1])
    assert roster.running == sequences
