"""The pure decisions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scheduler.loop import make_request

from moestro.core.request import Sequence
from moestro.errors import ConfigError
from moestro.scheduler import policy


def sequence(seq_id: int, priority: int = 0) -> Sequence:
    return Sequence(seq_id, make_request(str(seq_id), [1], priority=priority), 0, [1])


def ids(sequences: object) -> list[int]:
    return [seq.seq_id for seq in sequences]  # type: ignore[attr-defined]


def test_orders() -> None:
    sequences = [sequence(0, 5), sequence(1, -1), sequence(2, 5), sequence(3, 0)]
    assert ids(sorted(sequences, key=policy.sort_key_of("fcfs"))) == [0, 1, 2, 3]
    assert ids(sorted(sequences, key=policy.sort_key_of("priority"))) == [1, 3, 0, 2]


@pytest.mark.parametrize("name", ["deadline", "lifo", ""])
def test_an_unknown_policy_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="must be fcfs or priority"):
        policy.sort_key_of(name)


def test_turns_go_round_behind_the_last_one() -> None:
    key = policy.sort_key_of("fcfs")
    rows = [sequence(i) for i in (1, 3, 5)]
    assert ids(policy.turn_order(rows, None, key)) == [1, 3, 5]
    assert ids(policy.turn_order(rows, (0, 3), key)) == [5, 1, 3]
    assert ids(policy.turn_order(rows, (0, 4), key)) == [5, 1, 3]
    assert ids(policy.turn_order(rows, (0, 5), key)) == [1, 3, 5]


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 40))
def test_everybody_gets_a_turn_in_every_round(num_rows: int, limit: int, steps: int) -> None:
    key = policy.sort_key_of("fcfs")
    rows = [sequence(i) for i in range(num_rows)]
    last, turns = None, [0] * num_rows
    for _ in range(steps):
        for seq in list(policy.turn_order(rows, last, key))[:limit]:
            turns[seq.seq_id] += 1
            last = key(seq)
    assert max(turns) - min(turns) <= 1


def test_the_last_unplanned_one_behind_the_needy_is_the_victim() -> None:
    running = [sequence(i) for i in range(4)]
    assert policy.choose_victim(running, running[0], {}) is running[3]
    assert policy.choose_victim(running, running[0], {3: 1}) is running[2]
    assert policy.choose_victim(running, running[1], {2: 1, 3: 1}) is None
    assert policy.choose_victim(running, running[3], {}) is None


def test_headroom_is_one_page_a_sequence_but_small() -> None:
    assert policy.admission_headroom(0, 1000) == 0
    assert policy.admission_headroom(5, 1000) == 5
    assert policy.admission_headroom(100, 1000) == 31
    assert policy.admission_headroom(5, 31) == 0


def test_chunks() -> None:
    assert policy.chunk_size(10, 4) == 4
    assert policy.chunk_size(3, 4) == 3
    assert policy.chunk_size(3, 0) == 0
