"""Waiting for the store: how long, for what, and what is used of it in the end."""

import pytest
from tests.fakes.fake_mover import FakeMover
from tests.kvcache.sequences import make_sequence

from moestro.core.kv_hints import HintAction, HintRequest, MissReason
from moestro.core.page_moves import MoveFailure, MoveKind
from moestro.core.request import Sequence
from moestro.kvcache import KVCacheManager
from moestro.kvcache.identity import pack_tokens, page_hashes, root_hash
from moestro.kvcache.tier_policy import Speed, TierConfig

A = list(range(100, 133))  # 8 pages of 4 and a token


class World:
    """A manager with an empty cache over a store that has all of A; moves of 2 pages."""

    def __init__(self, num_slots: int = 16, **options: object) -> None:
        self.now_s = 0.0
        self.mover = FakeMover()
        for name in page_hashes(root_hash(b"", ""), pack_tokens(A), 4):
            self.mover.store[name] = (name,)
        self.kv = KVCacheManager(
            32,
            4,
            mover=self.mover,
            tiers=TierConfig(num_host_slots=num_slots, move_chunk_bytes=2, **options),
            clock=lambda: self.now_s,
        )
        self.fetcher = self.kv._below.fetcher
        self.measure(bytes_per_s=1e9, tokens_per_s=1.0)

    def measure(self, bytes_per_s: float, tokens_per_s: float) -> None:
        """As if both had been measured just now."""
        self.fetcher.store_speed = Speed(10.0)
        self.fetcher.store_speed.add(bytes_per_s, 1.0, self.now_s)
        self.fetcher.prefill_speed = Speed()
        self.kv.note_prefill(int(1000 * tokens_per_s), 1000.0)

    def arrive(self, tokens: list[int] = A) -> tuple[Sequence, bool]:
        seq = make_sequence(tokens)
        return seq, self.kv.prefetch(seq)

    def kinds(self) -> list[str]:
        return [move.kind.value for move in self.mover.submitted]

    def poll(self) -> list[int]:
        ready = self.kv.poll()
        self.kv.check([])
        return ready

    def run_moves(self) -> list[int]:
        """Let everything under way come to its end."""
        ready: list[int] = []
        for _ in range(20):
            self.mover.finish_all()
            ready += self.poll()
        return ready

    def admit(self, seq: Sequence) -> int:
        """Its cached tokens, after a step that has loaded them."""
        assert self.kv.admit(seq, 0)
        self.kv.take_loads()
        self.kv.end_step()
        self.kv.check([seq])
        return seq.num_cached_tokens


def test_what_is_stored_is_looked_up_and_fetched_two_moves_at_a_time() -> None:
    world = World()
    seq, waits = world.arrive()
    assert waits
    assert world.poll() == []
    world.mover.finish()
    world.poll()
    assert world.kinds() == ["lookup", "fetch", "fetch"]
    world.mover.finish()
    world.poll()
    assert world.kinds().count("fetch") == 3
    assert world.run_moves() == [seq.seq_id]
    assert world.admit(seq) == 32
    assert seq.prefix.store_tokens == 32


def test_moves_that_end_out_of_order_are_put_in_order() -> None:
    world = World()
    seq, _ = world.arrive()
    world.mover.finish()
    world.poll()
    world.mover.finish(1)
    world.poll()
    assert world.run_moves() == [seq.seq_id]
    assert world.admit(seq) == 32


def test_nothing_stored_is_known_after_one_lookup() -> None:
    world = World()
    world.mover.store.clear()
    seq, waits = world.arrive()
    assert waits
    assert world.run_moves() == [seq.seq_id]
    assert world.kinds() == ["lookup"]
    assert world.admit(seq) == 0
    assert seq.prefix.miss is MissReason.NO_PREFIX


@pytest.mark.parametrize("num_done", [0, 1])
def test_a_failed_fetch_ends_the_wait_with_the_part_before_it(num_done: int) -> None:
    world = World()
    seq, _ = world.arrive()
    world.mover.finish()
    world.poll()
    world.mover.finish()
    world.mover.finish(0, num_done, MoveFailure.CORRUPT)
    ready = world.poll() + world.run_moves()
    assert ready == [seq.seq_id]
    assert world.admit(seq) == 8 + 4 * num_done
    assert seq.prefix.miss is MissReason.LOAD_FAILED


def test_the_deadline_ends_the_wait_with_the_part_that_has_come() -> None:
    world = World(fetch_timeout_s=1.0)
    world.measure(bytes_per_s=1e9, tokens_per_s=16.0)  # 32 tokens: 2 s to compute
    seq, _ = world.arrive()
    world.mover.finish()
    world.poll()
    world.mover.finish()
    world.poll()
    world.now_s = 2.9
    assert world.poll() == []
    world.now_s = 3.0
    assert world.poll() == [seq.seq_id]
    assert world.mover.cancelled
    assert world.admit(seq) == 8
    world.mover.finish_all()  # what comes too late changes nothing
    world.kv.poll()
    world.kv.check([seq])


def test_a_slow_store_is_not_read() -> None:
    world = World()
    world.measure(bytes_per_s=1.0, tokens_per_s=1000.0)
    seq, waits = world.arrive()
    assert waits
    assert world.run_moves() == [seq.seq_id]
    assert world.kinds() == ["lookup"]
    assert seq.seq_id >= 0
    assert world.admit(seq) == 0
    assert seq.prefix.miss is MissReason.RECOMPUTED
    assert world.kv.tier_stats().recomputed_tokens == 32


def test_an_old_measurement_is_renewed_by_a_few_pages() -> None:
    world = World()
    world.measure(bytes_per_s=1.0, tokens_per_s=1000.0)
    world.now_s = 11.0
    world.mover.seconds_a_page = 1.0  # still slow
    seq, _ = world.arrive()
    assert world.run_moves() == [seq.seq_id]
    assert world.kinds() == ["lookup", "fetch"]
    assert world.admit(seq) == 4  # one page: at the old speed that takes longer than computing all


def test_a_store_that_got_fast_again_is_read_to_the_end() -> None:
    world = World()
    world.measure(bytes_per_s=0.1, tokens_per_s=1.0)
    world.now_s = 11.0
    world.mover.seconds_a_page = 1e-6
    seq, _ = world.arrive()
    assert world.run_moves() == [seq.seq_id]
    assert world.admit(seq) == 32


def test_requests_for_the_same_pages_share_one_fetch() -> None:
    world = World()
    first, _ = world.arrive()
    second, waits = world.arrive([*A[:20], 1, 2, 3, 4, 5])
    assert waits
    assert world.run_moves() == [first.seq_id, second.seq_id]
    fetched = [
        key for move in world.mover.submitted if move.kind is MoveKind.FETCH for key in move.keys
    ]
    assert len(fetched) == len(set(fetched)) == 8
    assert world.admit(second) == 20
    world.kv.release(second)
    assert world.admit(first) == 32


def test_a_follower_goes_on_by_itself_when_the_first_is_aborted() -> None:
    world = World()
    first, _ = world.arrive()
    second, _ = world.arrive()
    world.mover.finish()
    world.poll()
    world.kv.finish(first)
    assert world.run_moves() == [second.seq_id]
    assert world.admit(second) == 32


def test_followers_whose_time_is_up_with_the_first_s_end_once_and_look_no_more() -> None:
    world = World()
    waiting = [world.arrive()[0].seq_id for _ in range(3)]
    world.now_s += 1000.0
    assert world.poll() == waiting
    assert world.kinds() == ["lookup"]
    assert world.poll() == []


def test_full_host_slots_bound_what_is_fetched() -> None:
    world = World(num_slots=5)
    seq, _ = world.arrive()
    assert world.run_moves() == [seq.seq_id]
    assert world.admit(seq) == 16  # two moves of two pages; a third does not fit


def test_a_mover_that_takes_no_lookup_makes_nobody_wait() -> None:
    world = World()
    world.mover.max_moves = 0
    _, waits = world.arrive()
    assert not waits
    world.kv.check([])


def test_what_is_on_the_device_is_not_looked_up() -> None:
    world = World()
    seq, _ = world.arrive()
    world.run_moves()
    world.admit(seq)
    world.kv.publish(seq, 33)
    world.kv.release(seq)
    num_moves = len(world.mover.submitted)
    _, waits = world.arrive()
    assert not waits
    assert len(world.mover.submitted) == num_moves
    longer, waits = world.arrive([*A[:32], 1, 2, 3, 4, 5])
    assert waits
    assert len(world.mover.submitted[-1].keys) == 1
    world.kv.finish(longer)
    world.run_moves()


def test_what_a_waiting_sequence_builds_on_counts_as_used() -> None:
    world = World()
    for tokens in (A[:9], [7] * 9):
        seq = make_sequence(tokens)
        world.kv.admit(seq, 0)
        world.kv.publish(seq, 9)
        world.kv.release(seq)
    _, waits = world.arrive()
    assert waits
    oldest = world.kv._index.device.first()
    assert oldest is not None
    assert bytes(oldest.tokens[:4]) == pack_tokens([7])


def test_tenants_of_whom_nothing_came_are_forgotten() -> None:
    world = World()
    for salt in ("a", "b"):
        for name in page_hashes(root_hash(b"", salt), pack_tokens(A), 4):
            world.mover.store[name] = (name,)
        hint = HintRequest(action=HintAction.PREFETCH, token_ids=tuple(A), cache_salt=salt)
        world.kv.hint(hint)
        world.mover.finish()  # the lookup
        world.poll()
        while world.mover.queued:
            world.mover.finish(num_done=0, failure=MoveFailure.CORRUPT)
            world.poll()
    assert list(world.kv._index.roots()) == []


def test_what_the_store_lacks_is_put_again_once_it_is_computed() -> None:
    world = World()
    seq, _ = world.arrive()
    world.run_moves()
    world.admit(seq)
    world.kv.publish(seq, 32)
    world.kv.release(seq)
    pin = HintRequest(action=HintAction.PIN, token_ids=tuple(A), ttl_s=1000.0)
    assert world.kv.hint(pin).accepted
    other = make_sequence([7] * 128)  # 32 pages: nothing of A is left but the claim of its pin
    assert world.kv.admit(other, 0)
    world.fetcher._host.trim(0.0, 0.0)
    world.kv.release(other)
    world.mover.store.clear()
    seq, waits = world.arrive()
    assert waits
    world.run_moves()
    assert world.admit(seq) == 0
    world.kv.publish(seq, 32)
    world.kv.release(seq)
    world.run_moves()
    assert len(world.mover.store) == 8
