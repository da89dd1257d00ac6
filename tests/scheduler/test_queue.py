"""WaitingQueue against sorting a list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scheduler.test_policy import ids, sequence

from moestro.core.request import Sequence
from moestro.scheduler.policy import sort_key_of
from moestro.scheduler.queue import WaitingQueue


def test_a_preempted_sequence_comes_back_before_later_ones() -> None:
    queue = WaitingQueue(sort_key_of("fcfs"))
    sequences = [sequence(i) for i in range(3)]
    for seq in sequences:
        queue.push(seq)
    first = queue.pop()
    queue.push(first)
    assert [queue.pop().seq_id for _ in range(3)] == [0, 1, 2]


def test_empty() -> None:
    queue = WaitingQueue(sort_key_of("fcfs"))
    assert queue.peek() is None
    assert len(queue) == 0
    with pytest.raises(IndexError):
        queue.pop()


@given(st.lists(st.tuples(st.sampled_from("pppod"), st.integers(-2, 2)), max_size=40))
def test_any_use_agrees_with_a_sorted_list(actions: list[tuple[str, int]]) -> None:
    key = sort_key_of("priority")
    queue, model = WaitingQueue(key), list[Sequence]()
    for seq_id, (action, number) in enumerate(actions):
        if action == "p":
            model.append(sequence(seq_id, number))
            queue.push(model[-1])
        elif action == "o" and model:
            best = min(model, key=key)
            assert queue.pop() is best
            model.remove(best)
        elif action == "d" and model:
            queue.discard(model.pop(number % len(model)))
        assert queue.peek() is min(model, key=key, default=None)
        assert len(queue) == len(model)
    assert ids(sorted(model, key=key)) == [queue.pop().seq_id for _ in range(len(model))]
