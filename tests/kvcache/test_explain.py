"""Why a prompt missed."""

from tests.kvcache.test_hints import A, B, Cache

from moestro.core.kv_events import PagesRemoved, PagesStored
from moestro.core.kv_hints import MissReason, PrefixUse
from moestro.kvcache import KVCacheManager
from moestro.kvcache.identity import pack_tokens, page_hashes, root_hash


def test_a_whole_hit_has_no_reason() -> None:
    cache = Cache()
    cache.serve(A)
    assert cache.kv.explain(A, "") == PrefixUse(device_tokens=8)
    assert cache.kv.explain([*A, 1], "") == PrefixUse(device_tokens=12)


def test_the_first_differing_token_is_named() -> None:
    cache = Cache()
    cache.serve(A)
    changed = [*A[:6], 1, *A[7:], 5]
    use = cache.kv.explain(changed, "")
    assert use == PrefixUse(4, miss=MissReason.DIFFERS, first_difference=6)
    cache.serve(changed)  # the run is divided now
    use = cache.kv.explain([*A[:7], 1, 2, 3, 4, 5, 6], "")
    assert use == PrefixUse(4, miss=MissReason.DIFFERS, first_difference=7)
    use = cache.kv.explain([*A, 1, 2, 3, 4, 5], "")
    assert use == PrefixUse(12, miss=MissReason.DIFFERS, first_difference=12)


def test_what_nobody_asked_before_is_new() -> None:
    cache = Cache()
    cache.serve(A)
    assert cache.kv.explain(B, "").miss is MissReason.NO_PREFIX


def test_what_had_to_make_room_was_evicted() -> None:
    cache = Cache()
    cache.serve(A)
    cache.serve(B)
    cache.serve([7] * 16)  # 4 pages: 2 free, 2 of A
    use = cache.kv.explain([*A, 1], "")
    assert use == PrefixUse(4, miss=MissReason.EVICTED)


def test_another_tenants_prompt_is_told_to_operators_only() -> None:
    cache = Cache()
    cache.serve(A, salt="one")
    assert cache.kv.explain(A, "two").miss is MissReason.OTHER_NAMESPACE
    seq = cache.start(A, salt="two")
    assert seq.prefix.miss is MissReason.NO_PREFIX


def test_an_admission_notes_what_it_found() -> None:
    cache = Cache()
    cache.serve(A)
    seq = cache.start([*A[:6], 1, 2, 3])
    assert seq.prefix == PrefixUse(4, miss=MissReason.DIFFERS, first_difference=6)


def test_caching_off_is_a_reason() -> None:
    kv = KVCacheManager(8, 4, enable_prefix_caching=False)
    assert kv.explain(A, "").miss is MissReason.CACHING_OFF


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
