"""VirtualMover: moves take their time, results come once, the store forgets what is oldest."""

import pytest

from moestro.core.page_moves import Move, MoveFailure, MoveKind
from moestro.errors import ConfigError
from moestro.simulator.clock import VirtualClock
from moestro.simulator.sim_mover import MoveCosts, VirtualMover

COSTS = MoveCosts(
    save_bytes_per_s=100.0,
    put_bytes_per_s=50.0,
    fetch_bytes_per_s=20.0,
    store_call_s=0.5,
    max_queued_bytes=100.0,
)
A, B, C = (bytes([n]) * 16 for n in range(3))


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def mover(clock: VirtualClock) -> VirtualMover:
    return VirtualMover(clock, COSTS, page_bytes=10, num_store_pages=2)


def put(move_id: int, *keys: bytes) -> Move:
    return Move(move_id, MoveKind.PUT, keys=keys, slots=tuple(range(len(keys))))


def done(mover: VirtualMover, move: Move) -> tuple[int, MoveFailure | None]:
    assert mover.submit(move)
    mover.wait(1e6)
    (result,) = mover.poll()
    return result.num_done, result.failure


def test_moves_of_a_lane_follow_each_other(mover: VirtualMover, clock: VirtualClock) -> None:
    for move_id in (0, 1):
        mover.submit(Move(move_id, MoveKind.SAVE, pages=(1, 2), slots=(1, 2)))
    mover.submit(Move(2, MoveKind.SAVE, pages=(3,), slots=(3,), urgent=True))
    assert mover.poll() == []
    assert mover.state().num_queued_bytes == 50
    clock.advance(0.1)
    assert [r.move_id for r in mover.poll()] == [2]
    mover.wait(10.0)
    assert clock() == pytest.approx(0.2)
    (result,) = mover.poll()
    assert (result.move_id, result.num_bytes) == (0, 20)
    mover.wait(0.05)
    assert clock() == pytest.approx(0.25)
    assert mover.poll() == []
    clock.advance(0.2)
    assert [r.move_id for r in mover.poll()] == [1]
    assert mover.state().num_queued_bytes == 0


def test_store_gives_what_was_put(mover: VirtualMover, clock: VirtualClock) -> None:
    assert done(mover, put(0, A, B)) == (2, None)
    assert clock() == pytest.approx(0.5 + 20 / 50)
    assert done(mover, Move(1, MoveKind.LOOKUP, keys=(A, B, C))) == (2, MoveFailure.MISSING)
    fetch = Move(2, MoveKind.FETCH, keys=(A, C), slots=(0, 1), urgent=True)
    assert done(mover, fetch) == (1, MoveFailure.MISSING)
    done(mover, put(3, C))  # B was used longest ago
    assert done(mover, Move(4, MoveKind.LOOKUP, keys=(A, B))) == (1, MoveFailure.MISSING)
    assert mover.state().store_bytes == 20


def test_prefix_outlives_what_follows_it(mover: VirtualMover) -> None:
    done(mover, put(0, A, B, C))
    assert done(mover, Move(1, MoveKind.LOOKUP, keys=(A, B, C))) == (2, MoveFailure.MISSING)


def test_cancelled_moves_end_all_the_same(mover: VirtualMover) -> None:
    mover.submit(put(0, A))
    mover.cancel(0)
    mover.wait(10.0)
    (result,) = mover.poll()
    assert (result.num_done, result.failure) == (0, MoveFailure.CANCELLED)
    assert mover.state().store_bytes == 0


def test_refuses_when_too_much_is_queued(mover: VirtualMover) -> None:
    many = tuple(range(20))
    assert mover.submit(Move(0, MoveKind.SAVE, pages=many, slots=many))
    assert not mover.submit(Move(1, MoveKind.SAVE, pages=(1,), slots=(1,)))
    assert mover.submit(Move(2, MoveKind.SAVE, pages=(1,), slots=(1,), urgent=True))


def test_without_a_store(clock: VirtualClock) -> None:
    mover = VirtualMover(clock, COSTS, page_bytes=10, num_store_pages=0)
    assert not mover.has_store
    assert not mover.submit(put(0, A))
    assert mover.state().breaker == "none"
    with pytest.raises(ConfigError, match="put_bytes_per_s must be positive"):
        MoveCosts(put_bytes_per_s=float("inf"))
