"""Why a prompt missed."""

from tests.fakes.fake_mover import FakeMover
from tests.kvcache.sequences import explain, make_sequence
from tests.kvcache.test_hints import A, B, Cache

from moestro.core.kv_events import PagesRemoved, PagesStored
from moestro.core.kv_hints import MissReason, PrefixUse
from moestro.core.page_moves import MoveFailure, MoveKind
from moestro.kvcache import KVCacheManager
from moestro.kvcache.identity import pack_tokens, page_hashes, root_hash


def test_a_whole_hit_has_no_reason() -> None:
    cache = Cache()
    cache.serve(A)
    assert explain(cache.kv, A, "") == PrefixUse(device_tokens=8)
    assert explain(cache.kv, [*A, 1], "") == PrefixUse(device_tokens=12)


def test_the_first_differing_token_is_named() -> None:
    cache = Cache()
    cache.serve(A)
    changed = [*A[:6], 1, *A[7:], 5]
    use = explain(cache.kv, changed, "")
    assert use == PrefixUse(4, miss=MissReason.DIFFERS, first_difference=6)
    cache.serve(changed)  # the run is divided now
    use = explain(cache.kv, [*A[:7], 1, 2, 3, 4, 5, 6], "")
    assert use == PrefixUse(4, miss=MissReason.DIFFERS, first_difference=7)
    use = explain(cache.kv, [*A, 1, 2, 3, 4, 5], "")
    assert use == PrefixUse(12, miss=MissReason.DIFFERS, first_difference=12)


def test_what_nobody_asked_before_is_new() -> None:
    cache = Cache()
    cache.serve(A)
    assert explain(cache.kv, B, "").miss is MissReason.NO_PREFIX


def test_what_had_to_make_room_was_evicted() -> None:
    cache = Cache()
    cache.serve(A)
    cache.serve(B)
    cache.serve([7] * 16)  # 4 pages: 2 free, 2 of A
    use = explain(cache.kv, [*A, 1], "")
    assert use == PrefixUse(4, miss=MissReason.EVICTED)


def test_another_tenants_prompt_is_told_to_operators_only() -> None:
    cache = Cache()
    cache.serve(A, salt="one")
    assert explain(cache.kv, A, "two").miss is MissReason.OTHER_NAMESPACE
    seq = cache.start(A, salt="two")
    assert seq.prefix.miss is MissReason.NO_PREFIX


def test_an_admission_notes_what_it_found() -> None:
    cache = Cache()
    cache.serve(A)
    seq = cache.start([*A[:6], 1, 2, 3])
    assert seq.prefix == PrefixUse(4, miss=MissReason.DIFFERS, first_difference=6)


def test_caching_off_is_a_reason() -> None:
    kv = KVCacheManager(8, 4, enable_prefix_caching=False)
    assert explain(kv, A, "").miss is MissReason.CACHING_OFF


def test_events_tell_what_came_and_went_with_its_names() -> None:
    cache = Cache(records_events=True)
    names = page_hashes(root_hash(b"", ""), pack_tokens(A), 4)
    seq = cache.start(A)
    cache.kv.publish(seq, 5)
    cache.kv.publish(seq, 12)
    cache.kv.release(seq)
    cache.serve([7] * 28)
    first, second, removed, other = cache.kv.take_events()
    assert first == PagesStored((names[0],), None, tuple(A[:4]), 4, "device")
    assert second == PagesStored(tuple(names[1:]), names[0], tuple(A[4:]), 4, "device")
    assert removed == PagesRemoved(tuple(names[1:]), "device")
    assert isinstance(other, PagesStored)
    assert cache.kv.take_events() == []


def test_no_events_unless_asked_for() -> None:
    cache = Cache()
    cache.serve(A)
    assert cache.kv.take_events() == []


def stored(tokens: list[int], mover: FakeMover) -> None:
    """The store has the pages of these tokens."""
    for name in page_hashes(root_hash(b"", ""), pack_tokens(tokens), 4):
        mover.store[name] = (name,)


def test_the_store_is_asked_for_what_no_run_has() -> None:
    mover = FakeMover()
    stored(A, mover)
    cache = Cache(mover=mover, num_host_slots=8)
    assert explain(cache.kv, [*A, 0]) == PrefixUse(store_tokens=12)
    use = explain(cache.kv, [*A[:8], 1, 2, 3, 4, 5])
    assert use == PrefixUse(store_tokens=8, miss=MissReason.DIFFERS, first_difference=8)
    cache.serve(A[:4])
    use = explain(cache.kv, [*A, 7, 7, 7, 7, 7])
    assert use == PrefixUse(4, 0, 8, miss=MissReason.DIFFERS, first_difference=12)
    assert explain(cache.kv, B).miss is MissReason.NO_PREFIX
    kinds = [move.kind for move in mover.submitted]
    assert MoveKind.FETCH not in kinds  # a question moves nothing
    cache.kv.check([])


def test_a_store_that_gives_no_answer_is_told() -> None:
    mover = FakeMover()
    stored(A, mover)
    cache = Cache(mover=mover, num_host_slots=8)
    told: list[PrefixUse] = []
    cache.kv.explain([*A, 0], "", told.append)
    assert (told, cache.kv.is_moving) == ([], True)
    mover.finish(num_done=0, failure=MoveFailure.TIMEOUT)
    cache.kv.poll()
    mover.max_moves = 0
    cache.kv.explain([*A, 0], "", told.append)
    assert told == [PrefixUse(miss=MissReason.LOAD_FAILED)] * 2


def test_a_request_tells_that_its_store_could_not_be_asked() -> None:
    mover = FakeMover(max_moves=0)
    stored(A, mover)
    cache = Cache(mover=mover, num_host_slots=8)
    seq = make_sequence([*A, 0])
    assert not cache.kv.prefetch(seq)
    assert cache.kv.admit(seq, 0)
    assert seq.prefix == PrefixUse(miss=MissReason.LOAD_FAILED)
    cache.kv.check([seq])
