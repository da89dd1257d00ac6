"""KVCacheManager: rules one by one."""

import pytest
from tests.kvcache.sequences import make_sequence

from moestro.core.request import Sequence
from moestro.errors import CapacityError, ConfigError
from moestro.kvcache import KVCacheManager

A = list(range(100, 112))


def compute(kv: KVCacheManager, seq: Sequence) -> None:
    """As if all known tokens had been computed."""
    seq.num_computed_tokens = len(seq.token_ids)
    kv.publish(seq, seq.num_computed_tokens)


def admitted(kv: KVCacheManager, token_ids: list[int], cache_salt: str = "") -> Sequence:
    seq = make_sequence(token_ids, cache_salt)
    assert kv.admit(seq, 0)
    return seq


def warm(kv: KVCacheManager, token_ids: list[int], cache_salt: str = "") -> list[int]:
    """Compute a sequence and release it; the pages it had."""
    seq = admitted(kv, token_ids, cache_salt)
    compute(kv, seq)
    pages = list(seq.pages)
    kv.release(seq)
    return pages


def test_admission_gives_pages_for_all_known_tokens() -> None:
    kv = KVCacheManager(8, 4)
    seq = admitted(kv, A[:9])
    assert seq.pages == [0, 1, 2]
    assert (seq.num_computed_tokens, seq.num_cached_tokens) == (0, 0)
    assert kv.stats().num_used_pages == 3


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_the_last_token_is_never_a_hit(length: int, hit: int) -> None:
    kv = KVCacheManager(8, 4)
    warm(kv, A)
    seq = admitted(kv, A[:length])
    assert (seq.num_computed_tokens, seq.num_cached_tokens) == (hit, hit)
    assert seq.pages[: hit // 4] == [0, 1, 2][: hit // 4]


def test_hits_need_equal_tokens_from_the_start() -> None:
    kv = KVCacheManager(16, 4)
    warm(kv, A)
    assert admitted(kv, [*A[:6], 1, *A[7:]]).num_cached_tokens == 4
    assert admitted(kv, [1, *A[1:]]).num_cached_tokens == 0
    assert admitted(kv, A[4:]).num_cached_tokens == 0


def test_pages_are_shared_while_their_first_owner_runs() -> None:
    kv = KVCacheManager(8, 4)
    first = admitted(kv, A)
    compute(kv, first)
    second = admitted(kv, A)
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    assert kv.stats().num_used_pages == 4
    kv.check([first, second])
    kv.release(first)
    kv.check([second])
    assert kv.stats().num_used_pages == 3


def test_only_full_computed_pages_are_published() -> None:
    kv = KVCacheManager(8, 4)
    first = admitted(kv, A)
    kv.publish(first, 7)
    assert first.num_published_pages == 1
    assert admitted(kv, A).num_cached_tokens == 4
    kv.publish(first, 8)
    assert admitted(kv, A).num_cached_tokens == 8


def test_uncomputed_pages_are_not_kept_on_release() -> None:
    kv = KVCacheManager(8, 4)
    first = admitted(kv, A)
    kv.publish(first, 5)
    kv.release(first)
    assert kv.stats().num_idle_pages == 1
    assert admitted(kv, A).num_cached_tokens == 4


def test_generated_tokens_are_published_too() -> None:
    kv = KVCacheManager(8, 4)
    seq = admitted(kv, A[:3])
    seq.token_ids += A[3:9]
    assert kv.grow(seq, 9) == (1, 2)
    compute(kv, seq)
    kv.release(seq)
    assert admitted(kv, A).num_cached_tokens == 8


def test_the_end_of_a_prefix_is_evicted_before_its_start() -> None:
    kv = KVCacheManager(4, 4)
    warm(kv, A)  # 3 idle pages, 1 free
    other = admitted(kv, [7] * 8)  # takes the free one and evicts one
    kv.release(other)
    assert admitted(kv, A).num_cached_tokens == 8


def test_least_recently_used_prefixes_go_first() -> None:
    kv = KVCacheManager(4, 4)
    warm(kv, A[:4])
    warm(kv, [1] * 4)
    kv.release(admitted(kv, A[:5]))  # a hit makes A the newest
    kv.release(admitted(kv, [7] * 12))  # two free pages and the oldest idle one
    assert admitted(kv, [1] * 5).num_cached_tokens == 0
    assert admitted(kv, A[:5]).num_cached_tokens == 4


def test_its_own_hits_are_not_evicted_to_make_room() -> None:
    kv = KVCacheManager(3, 4)
    warm(kv, A[:8])  # 2 idle, 1 free
    seq = make_sequence([*A[:8], 1, 2, 3, 4, 5])  # 2 hits and 2 more: does not fit
    assert kv.pages_short(seq, 0) == 1
    assert not kv.admit(seq, 0)
    assert seq.pages == []
    kv.check([])
    assert admitted(kv, [*A[:8], 1, 2, 3, 4]).pages == [0, 1, 2]


def test_a_refusal_changes_nothing_and_ends_with_a_release() -> None:
    kv = KVCacheManager(4, 4)
    holder = admitted(kv, [9] * 8)
    seq = make_sequence(A)
    for _ in range(3):
        assert not kv.admit(seq, 0)
        assert kv.pages_short(seq, 0) == 1
    assert kv.stats().queries_tokens == 8
    kv.check([holder])
    kv.release(holder)
    assert kv.admit(seq, 0)


def test_headroom_stays_available() -> None:
    kv = KVCacheManager(4, 4)
    seq = make_sequence(A)
    assert kv.pages_short(seq, 2) == 1
    assert not kv.admit(seq, 2)
    assert kv.admit(seq, 1)


def test_grow_takes_what_is_missing_or_nothing() -> None:
    kv = KVCacheManager(3, 4)
    seq = admitted(kv, A[:4])
    assert kv.grow(seq, 4) == ()
    assert kv.grow(seq, 5) == (1,)
    assert kv.grow(seq, 13) is None
    assert seq.pages == [0, 1]
    assert kv.grow(seq, 12) == (2,)


def test_without_use_cache_nothing_is_read_but_pages_are_published() -> None:
    kv = KVCacheManager(8, 4)
    warm(kv, A)
    seq = make_sequence([*A, 1, 2, 3, 4])
    assert kv.admit(seq, 0, use_cache=False)
    assert seq.num_cached_tokens == 0
    assert kv.stats().queries_tokens == len(A)  # of the first sequence only
    compute(kv, seq)
    kv.release(seq)
    assert admitted(kv, [*A, 1, 2, 3, 4, 5]).num_cached_tokens == 16


def test_caching_off_shares_and_keeps_nothing() -> None:
    kv = KVCacheManager(8, 4, enable_prefix_caching=False)
    warm(kv, A)
    assert kv.stats().num_idle_pages == 0
    seq = admitted(kv, A)
    assert seq.num_cached_tokens == 0
    assert kv.stats().queries_tokens == 0


def test_tenants_do_not_meet() -> None:
    kv = KVCacheManager(16, 4)
    warm(kv, A, "one")
    assert admitted(kv, A, "two").num_cached_tokens == 0
    assert admitted(kv, A).num_cached_tokens == 0
    assert admitted(kv, A, "one").num_cached_tokens == 8


def test_a_preempted_sequence_finds_its_own_pages_and_is_counted_once() -> None:
    kv = KVCacheManager(8, 4)
    seq = admitted(kv, A[:6])
    seq.token_ids += A[6:]
    assert kv.grow(seq, 12) == (2,)
    compute(kv, seq)
    kv.release(seq)
    seq.num_preemptions = 1
    assert kv.admit(seq, 0)
    assert seq.num_computed_tokens == 8
    assert seq.num_cached_tokens == 0  # what the user is told: found at the first admission
    assert kv.stats().queries_tokens == 6
    assert kv.stats().hits_tokens == 0


def test_two_that_compute_the_same_page_keep_one_of_them() -> None:
    kv = KVCacheManager(8, 4)
    first, second = admitted(kv, A), admitted(kv, A)
    compute(kv, first)
    compute(kv, second)
    kv.release(second)
    assert kv.stats().num_idle_pages == 0
    kv.release(first)
    assert kv.stats().num_idle_pages == 3
    kv.check([])


def test_the_loser_of_that_race_steps_in_when_the_winner_is_gone() -> None:
    kv = KVCacheManager(4, 4)
    first = admitted(kv, A[:4])
    second = admitted(kv, A[:8])
    compute(kv, first)
    compute(kv, second)  # its first page lost, its second is published
    kv.release(first)
    other = admitted(kv, [7] * 8)  # evicts the winner's page
    kv.release(other)
    kv.release(second)
    assert admitted(kv, A[:9]).num_cached_tokens == 8


def test_nonsense_sizes_are_refused() -> None:
    with pytest.raises(CapacityError, match="0 pages"):
        KVCacheManager(0, 4)
    with pytest.raises(ConfigError, match="page_size must be at least 1, got 0"):
        KVCacheManager(4, 0)


def test_check_finds_a_lost_page() -> None:
    kv = KVCacheManager(4, 4)
    seq = admitted(kv, A[:4])
    with pytest.raises(AssertionError, match="page 0 is lost"):
        kv.check([])
    seq.pages.append(3)
    with pytest.raises(AssertionError, match="page 3 has two owners"):
        kv.check([seq])
