"""Sinking: what is saved when, and what becomes of moves that do a part or nothing."""

from tests.fakes.fake_mover import FakeMover
from tests.kvcache.sequences import make_sequence

from moestro.core.page_moves import MoveFailure, MoveKind
from moestro.core.request import Sequence
from moestro.kvcache import KVCacheManager
from moestro.kvcache.tier_policy import TierConfig, WritePolicy

A = list(range(100, 124))  # 6 pages of 4


class World:
    """A manager of 16 pages over a fake mover, moves of 3 pages."""

    def __init__(self, num_slots: int = 16, store: bool = False, **options: object) -> None:
        self.now_s = 0.0
        self.mover = FakeMover(has_store=store)
        self.kv = KVCacheManager(
            16,
            4,
            mover=self.mover,
            tiers=TierConfig(num_host_slots=num_slots, move_chunk_bytes=3, **options),
            clock=lambda: self.now_s,
        )

    def serve(self, tokens: list[int]) -> Sequence:
        seq = make_sequence(tokens)
        assert self.kv.admit(seq, 0)
        self.kv.take_loads()
        self.kv.end_step()
        self.kv.publish(seq, len(tokens))
        self.kv.release(seq)
        return seq

    def poll(self) -> None:
        self.kv.poll()
        self.kv.check([])

    def settle(self) -> None:
        for _ in range(5):
            self.mover.finish_all()
            self.poll()

    def moved(self, kind: MoveKind) -> list[int]:
        """Pages of each move of this kind so far."""
        return [len(move.slots) for move in self.mover.submitted if move.kind is kind]

    @property
    def num_host_pages(self) -> int:
        return sum(len(run.slots) for run in self.kv._index.runs())


def test_a_long_run_is_saved_in_moves() -> None:
    world = World()
    world.serve(A)
    world.settle()
    assert world.moved(MoveKind.SAVE) == [3, 3]
    assert world.num_host_pages == 6
    assert len(list(world.kv._index.runs())) == 1  # joined again


def test_a_run_that_grows_is_saved_when_it_fills_a_move_or_ends() -> None:
    world = World()
    seq = make_sequence(A[:20])
    assert world.kv.admit(seq, 0)
    for num_tokens in (4, 8):
        world.kv.publish(seq, num_tokens)
        world.kv.poll()
    assert world.mover.submitted == []
    world.kv.publish(seq, 12)
    world.kv.poll()
    assert world.moved(MoveKind.SAVE) == [3]
    world.kv.publish(seq, 16)
    world.kv.poll()
    assert world.moved(MoveKind.SAVE) == [3]
    world.kv.release(seq)
    world.poll()
    assert world.moved(MoveKind.SAVE) == [3, 1]


def test_a_save_that_does_a_part_counts_for_that_part() -> None:
    world = World()
    world.serve(A[:12])
    world.poll()
    world.mover.finish(0, 2, MoveFailure.ERROR)
    world.poll()
    assert world.num_host_pages == 2
    assert world.kv._below.host.allocator.num_taken == 2
    assert world.kv._below.sinker.num_dropped_pages == 1
    world.serve([*A[:12], 1])  # found again: offered again
    world.settle()
    assert world.num_host_pages == 3


def test_pages_on_their_way_are_not_evicted() -> None:
    world = World()
    world.serve(A)
    world.poll()
    assert world.kv.num_available_pages == 16 - 6
    assert not world.kv.admit(make_sequence([7] * 44), 0)
    world.settle()
    assert world.kv.admit(make_sequence([7] * 44), 0)


def test_what_reaches_the_host_goes_on_to_the_store() -> None:
    world = World(store=True)
    world.serve(A)
    world.settle()
    assert world.moved(MoveKind.PUT) == [3, 3]
    assert len(world.mover.store) == 6
    assert all(run.stored for run in world.kv._index.runs())
    world.serve([*A, 1])
    world.settle()
    assert world.moved(MoveKind.PUT) == [3, 3]


def test_a_put_that_does_a_part_is_tried_again_when_found_again() -> None:
    world = World(store=True)
    world.serve(A[:12])
    world.poll()
    world.mover.finish()
    world.poll()
    world.mover.finish(0, 1, MoveFailure.FULL)
    world.poll()
    assert [run.stored for run in world.kv._index.runs()] == [True, False]
    world.serve([*A[:12], 1])
    world.settle()
    assert len(world.mover.store) == 3


def test_a_store_that_comes_later_gets_what_is_found_again() -> None:
    world = World()
    world.serve(A[:8])
    world.settle()
    world.mover.has_store = True
    world.serve([*A[:8], 1])
    world.settle()
    assert len(world.mover.store) == 2


def test_without_slots_the_sink_is_dropped() -> None:
    world = World(num_slots=4)
    world.serve(A)
    world.poll()
    assert world.moved(MoveKind.SAVE) == [3]
    assert world.kv._below.sinker.num_dropped_pages == 3
    world.settle()
    assert world.num_host_pages == 3


def test_full_slots_are_taken_from_what_was_used_longest_ago() -> None:
    world = World(num_slots=6, low_water=1.0, high_water=1.0)
    world.serve(A[:12])
    world.settle()
    world.serve([1] * 12)
    world.settle()
    world.serve([2] * 12)
    world.settle()
    assert world.num_host_pages == 6
    first = world.kv._index.match("", make_packed(A[:12]), 3)
    assert not any(run.slots for run, _ in first)


def test_write_back_saves_a_run_once_even_if_the_host_does_not_keep_it() -> None:
    """Else its pages would always be on their way, and never anybody's."""
    world = World(num_slots=4, write_policy=WritePolicy.WRITE_BACK, low_water=0.0, high_water=0.5)
    world.serve(A)
    world.serve([7] * 16)
    for _ in range(10):
        world.settle()
    assert sum(world.moved(MoveKind.SAVE)) <= 10
    assert world.kv.num_available_pages == 16


def make_packed(tokens: list[int]) -> bytes:
    seq = make_sequence(tokens)
    KVCacheManager(1, 4).pack(seq)
    return seq.packed_tokens


def test_what_the_store_has_evicted_is_put_again_when_it_is_found() -> None:
    world = World(store=True)
    world.serve([*A, 1])
    world.settle()
    assert len(world.mover.store) == 6
    for name in list(world.mover.store)[4:]:
        del world.mover.store[name]
    world.serve([*A, 1])
    world.settle()
    assert len(world.mover.store) == 4  # it said so just now
    world.now_s = 100.0
    world.serve([*A, 1])
    world.settle()
    assert len(world.mover.store) == 6
    world.now_s = 200.0
    world.serve([*A, 1])
    world.kv.poll()
    assert world.mover.queued[0].kind is MoveKind.LOOKUP
    world.mover.finish(num_done=0, failure=MoveFailure.TIMEOUT)  # no answer is no news
    world.poll()
    world.poll()
    assert not world.mover.queued  # and no reason to ask every step
    assert all(run.stored for run in world.kv._index.runs())
    assert len(list(world.kv._index.runs())) == 1


def test_write_back_asks_again_before_it_counts_on_the_store() -> None:
    world = World(
        num_slots=8, store=True, write_policy=WritePolicy.WRITE_BACK, high_water=0.5, low_water=0.2
    )
    world.serve(A)
    world.serve([7] * 16)
    world.settle()
    assert world.mover.store
    world.mover.store.clear()
    world.now_s = 100.0
    world.settle()
    for run in world.kv._index.runs():
        assert not run.stored or run.stored_s == 100.0
