"""Hints: what is pinned stays, what is dropped goes, and every one is answered."""

from tests.fakes.fake_mover import FakeMover
from tests.kvcache.sequences import explain

from moestro.core.kv_hints import HintAction, HintAnswer, HintRefusal, HintRequest, KVHints
from moestro.core.page_moves import MoveKind
from moestro.core.request import Request, Sequence
from moestro.core.sampling_params import SamplingParams
from moestro.kvcache import KVCacheManager
from moestro.kvcache.tier_policy import TierConfig

A = list(range(100, 112))  # 3 pages of 4
B = list(range(200, 212))


class Cache:
    """A manager of 8 pages, with a clock, that serves whole requests."""

    def __init__(self, num_pages: int = 8, **options: object) -> None:
        self.now_s = 0.0
        mover = options.pop("mover", None)
        self.kv = KVCacheManager(
            num_pages,
            4,
            mover=mover,
            tiers=TierConfig(session_share=0.5, **options),
            clock=lambda: self.now_s,
        )
        self.next_id = 0

    def start(self, tokens: list[int], hints: KVHints | None = None, salt: str = "") -> Sequence:
        seq = self.sequence(tokens, hints, salt)
        assert self.kv.admit(seq, 0)
        return seq

    def sequence(self, tokens: list[int], hints: KVHints | None = None, salt: str = "") -> Sequence:
        self.next_id += 1
        request = Request(
            request_id=str(self.next_id),
            prompt_token_ids=tuple(tokens),
            params=SamplingParams(),
            seed=0,
            max_tokens=1,
            cache_salt=salt,
            kv_hints=hints,
        )
        return Sequence(self.next_id, request, 0, list(tokens))

    def end(self, seq: Sequence) -> None:
        self.kv.publish(seq, len(seq.token_ids))
        self.kv.release(seq)
        self.kv.finish(seq)

    def serve(self, tokens: list[int], hints: KVHints | None = None, salt: str = "") -> Sequence:
        seq = self.start(tokens, hints, salt)
        self.end(seq)
        self.kv.check([])
        return seq

    def hint(
        self, action: HintAction, holders: list[Sequence] | None = None, **options: object
    ) -> HintAnswer:
        answer = self.kv.hint(HintRequest(action=action, **options))
        self.kv.check(holders or [])
        return answer

    def num_cached(self, tokens: list[int], salt: str = "") -> int:
        return explain(self.kv, [*tokens, 0], salt).num_cached_tokens


def cache_over(mover: FakeMover) -> Cache:
    return Cache(num_pages=20, mover=mover, num_host_slots=20)


def settle(cache: Cache, mover: FakeMover) -> None:
    for _ in range(5):
        mover.finish_all()
        cache.kv.poll()


def test_a_pin_outlives_what_came_later_until_its_time_is_over() -> None:
    cache = Cache()
    seq = cache.serve(A, KVHints(session_id="a", pin_ttl_s=10.0))
    assert seq.hint_answer == HintAnswer(12, 0, None, 10.0)
    cache.serve(B)
    cache.serve([7] * 16)  # 8 pages: B goes, A stays
    assert cache.num_cached(A) == 12
    assert cache.num_cached(B) == 4
    assert cache.kv.tier_stats().num_pins == 1
    cache.now_s = 10.0
    cache.kv.poll()
    assert cache.kv.tier_stats().num_pins == 0
    cache.serve([8] * 32)
    assert cache.num_cached(A) == 0


def test_a_pin_never_keeps_a_running_sequence_from_its_pages() -> None:
    cache = Cache()
    cache.serve(A, KVHints(session_id="a", pin_ttl_s=10.0))
    cache.end(cache.start([9] * 32))
    assert cache.num_cached(A) == 0


def test_what_is_pinned_is_not_given_to_the_next_request_while_others_run() -> None:
    cache = Cache()
    cache.serve(A, KVHints(session_id="a", pin_ttl_s=10.0))  # 3 of 8 pages
    running = cache.start([7] * 8)  # 2 pages, and 3 are left
    waiting = cache.sequence([8] * 16)
    assert not cache.kv.admit(waiting, 0)
    assert cache.kv.pages_short(waiting, 0) == 1
    own = cache.sequence([*A, 1])
    assert cache.kv.admit(own, 0)
    assert own.num_cached_tokens == 12
    cache.end(own)
    cache.end(running)
    assert cache.kv.admit(waiting, 0)
    assert cache.num_cached(A) == 12


def test_who_waits_for_pinned_pages_gets_them_when_the_pin_or_the_last_request_ends() -> None:
    for how in ("expired", "unpinned", "alone"):
        cache = Cache()
        cache.serve(A, KVHints(session_id="a", pin_ttl_s=10.0))
        running = cache.start([7] * 8)
        waiting = cache.sequence([8] * 24)
        assert not cache.kv.admit(waiting, 0)
        if how == "expired":
            cache.now_s = 10.0
            cache.kv.poll()
        elif how == "unpinned":
            cache.hint(HintAction.PIN, [running], session_id="a", ttl_s=0)
        else:
            cache.end(running)
        assert cache.kv.admit(waiting, 0)
        cache.kv.check([waiting] if how == "alone" else [running, waiting])


def test_a_running_sequence_grows_into_pinned_pages() -> None:
    cache = Cache()
    cache.serve(A, KVHints(session_id="a", pin_ttl_s=10.0))
    running = cache.start([7] * 8)
    assert cache.kv.grow(running, 32) is not None
    assert cache.num_cached(A) == 0


def test_a_pin_is_clipped_to_its_quota_and_replaced_by_the_next() -> None:
    cache = Cache(num_pages=8)  # 4 pages a session, 4 for all
    long = list(range(24))
    answer = cache.serve(long, KVHints(session_id="a", pin_ttl_s=5.0)).hint_answer
    assert answer == HintAnswer(16, 8, None, 5.0)
    cache.serve(A[:4])
    other = cache.hint(HintAction.PIN, token_ids=tuple(A[:4]), ttl_s=5.0)
    assert other == HintAnswer(0, 4, HintRefusal.OVER_QUOTA)
    again = cache.hint(HintAction.PIN, session_id="a", ttl_s=7.0)
    assert (again.accepted, again.expires_in_s) == (16, 7.0)
    ended = cache.hint(HintAction.PIN, session_id="a", ttl_s=0)
    assert (ended.accepted, ended.expires_in_s) == (16, 0.0)
    assert cache.hint(HintAction.PIN, token_ids=tuple(A[:4]), ttl_s=5.0).accepted == 4


def test_two_pins_of_one_prefix_hold_until_the_last_ends() -> None:
    cache = Cache()
    cache.serve(A[:8])
    cache.hint(HintAction.PIN, token_ids=tuple(A[:8]), ttl_s=5.0)
    cache.serve([*A[:4], 1, 2, 3, 4], KVHints(session_id="b", pin_ttl_s=20.0))
    cache.now_s = 6.0
    cache.kv.poll()
    cache.serve([8] * 24)
    assert cache.num_cached([*A[:4], 1, 2, 3, 4]) == 8
    assert cache.num_cached(A[:8]) == 4


def test_unknown_sessions_and_other_tenants_are_told_the_same() -> None:
    cache = Cache()
    cache.serve(A, KVHints(session_id="a"), salt="one")
    for salt in ("", "two"):
        for action in HintAction:
            ttl_s = 1.0 if action is HintAction.PIN else None
            answer = cache.hint(action, session_id="a", cache_salt=salt, ttl_s=ttl_s)
            assert answer.refused is HintRefusal.UNKNOWN_SESSION
    assert cache.hint(HintAction.DROP, session_id="a", cache_salt="one").accepted == 12


def test_what_is_not_cached_can_not_be_pinned() -> None:
    cache = Cache()
    answer = cache.hint(HintAction.PIN, token_ids=tuple(A), ttl_s=5.0)
    assert answer == HintAnswer(0, 12, HintRefusal.NOT_CACHED)


def test_drop_on_finish_takes_what_only_this_session_used() -> None:
    cache = Cache(num_pages=20)
    cache.serve(A[:8], KVHints(session_id="a"))
    cache.serve([*A[:8], 1, 2, 3, 4], KVHints(session_id="b"))
    seq = cache.serve([*A[:8], 5, 5, 5, 5, 6], KVHints(session_id="a", drop_on_finish=True))
    assert seq.hint_answer is not None
    assert seq.hint_answer.accepted == 4  # the first two pages have been found by b
    assert cache.num_cached([*A[:8], 5, 5, 5, 5]) == 8
    assert cache.num_cached([*A[:8], 1, 2, 3, 4]) == 12
    assert cache.hint(HintAction.DROP, session_id="a").refused is HintRefusal.UNKNOWN_SESSION


def test_drop_by_prompt_takes_the_branch_with_what_was_generated() -> None:
    cache = Cache(num_pages=20)
    cache.serve([*A[:8], 1, 2, 3, 4, 5, 6, 7, 8])
    cache.serve([*A[:8], 9, 9, 9, 9])
    answer = cache.hint(HintAction.DROP, token_ids=(*A[:8], 1, 2, 3, 4))
    assert answer.accepted == 8
    assert cache.num_cached([*A[:8], 1, 2, 3, 4]) == 8
    assert cache.num_cached([*A[:8], 9, 9, 9, 9]) == 12


def test_what_is_dropped_is_deleted_from_the_store_and_what_others_use_is_not() -> None:
    mover = FakeMover()
    cache = cache_over(mover)
    cache.serve([*A[:8], 9, 9, 9, 9])
    cache.serve([*A[:8], 1, 2, 3, 4])
    settle(cache, mover)
    assert len(mover.store) == 4
    assert cache.hint(HintAction.DROP, token_ids=(*A[:8], 1, 2, 3, 4)).accepted == 4
    (move,) = [move for move in mover.queued if move.kind is MoveKind.DELETE]
    assert len(move.keys) == 1
    mover.finish_all()
    cache.kv.poll()
    assert len(mover.store) == 3


def test_a_drop_that_the_mover_refuses_is_a_drop_all_the_same() -> None:
    mover = FakeMover()
    cache = cache_over(mover)
    cache.serve(A)
    settle(cache, mover)
    mover.max_moves = 0
    assert cache.hint(HintAction.DROP, token_ids=tuple(A)).accepted == 12
    assert mover.num_refused == 1
    assert cache.num_cached(A) == 0


def test_what_runs_is_not_dropped() -> None:
    cache = Cache()
    cache.serve(A, KVHints(session_id="a"))
    seq = cache.start([*A, 1])
    answer = cache.kv.hint(HintRequest(action=HintAction.DROP, session_id="a"))
    assert answer.refused is HintRefusal.IN_USE
    cache.end(seq)
    assert cache.num_cached(A) == 12


def test_what_is_demoted_goes_first_and_its_end_before_its_start() -> None:
    cache = Cache()
    cache.serve(B)
    cache.serve(A, KVHints(session_id="a"))
    assert cache.hint(HintAction.DEMOTE, session_id="a").accepted == 12
    cache.serve([7] * 16)  # takes 2 free pages and 2 of A
    assert cache.num_cached(A) == 4
    assert cache.num_cached(B) == 12


def test_priority_of_a_request_decides_between_idle_runs() -> None:
    cache = Cache()
    cache.serve(A, KVHints(priority=90))
    cache.serve(B)
    cache.serve([7] * 16)
    assert (cache.num_cached(A), cache.num_cached(B)) == (12, 4)


def test_prefetch_brings_stored_pages_to_the_host_and_pins_them() -> None:
    first = FakeMover()
    cache = Cache(mover=first, num_host_slots=8)
    cache.serve(A)
    for _ in range(3):
        cache.kv.poll()
        first.finish_all()
    mover = FakeMover()
    mover.store = first.store
    assert len(mover.store) == 3
    cache = Cache(mover=mover, num_host_slots=8)
    answer = cache.hint(HintAction.PREFETCH, token_ids=tuple(A), ttl_s=9.0)
    assert answer == HintAnswer(0, 0, requested=12)
    for _ in range(3):
        mover.finish_all()
        assert cache.kv.poll() == []
    assert explain(cache.kv, [*A, 0], "").host_tokens == 12
    assert cache.kv.tier_stats().num_pins == 1
    cache.kv.check([])
    assert cache.hint(HintAction.PREFETCH, token_ids=tuple(A)).accepted == 12


def test_prefetch_without_tiers_says_so() -> None:
    answer = Cache().hint(HintAction.PREFETCH, token_ids=tuple(A))
    assert answer == HintAnswer(0, 12, HintRefusal.NO_TIER)


def test_every_answer_is_counted() -> None:
    cache = Cache()
    cache.serve(A, KVHints(session_id="a", pin_ttl_s=1.0))
    cache.hint(HintAction.PIN, session_id="b", ttl_s=1.0)
    (counts,) = cache.kv.tier_stats().hints
    assert counts.requested_tokens == 0
    assert (counts.action, counts.num_accepted, counts.num_refused) == ("pin", 1, 1)
    assert (counts.accepted_tokens, counts.clipped_tokens) == (12, 0)


def test_without_caching_hints_are_refused() -> None:
    kv = KVCacheManager(8, 4, enable_prefix_caching=False)
    answer = kv.hint(HintRequest(action=HintAction.DROP, token_ids=tuple(A)))
    assert answer == HintAnswer(0, 12, HintRefusal.CACHING_OFF)


def test_a_session_that_is_pinned_turn_after_turn_stays_one_run() -> None:
    cache = Cache(num_pages=40)
    tokens = list(A)
    for turn in range(6):
        cache.serve(tokens, KVHints(session_id="a", pin_ttl_s=50.0))
        tokens = [*tokens, *(turn + i for i in range(4))]
    assert len(list(cache.kv._index.runs())) <= 2
    assert cache.num_cached(tokens[:-4]) == 32


def test_a_prefetch_tells_what_is_there_from_what_was_only_asked_for() -> None:
    mover = FakeMover()
    cache = Cache(mover=mover, num_host_slots=8)
    cache.serve(A[:4])
    answer = cache.hint(HintAction.PREFETCH, token_ids=(*A, 1, 2))
    assert answer == HintAnswer(4, 2, requested=8)  # nobody knows yet that the store lacks them
    mover.max_moves = 0
    cache = Cache(mover=mover, num_host_slots=8)
    answer = cache.hint(HintAction.PREFETCH, token_ids=tuple(A))
    assert answer == HintAnswer(0, 12, HintRefusal.BUSY)
    assert cache.kv._below.fetcher.claimed() == []


def test_the_share_of_all_pins_is_bounded_too() -> None:
    cache = Cache(pin_share=0.25)  # 2 of 8 pages
    cache.serve(A, KVHints(session_id="a"))
    cache.serve([*B[:4], 1], KVHints(session_id="b"))
    assert cache.hint(HintAction.PIN, session_id="a", ttl_s=5.0) == HintAnswer(8, 4, None, 5.0)
    answer = cache.hint(HintAction.PIN, session_id="b", ttl_s=5.0)
    assert answer == HintAnswer(0, 5, HintRefusal.OVER_QUOTA)
    cache = Cache(pin_share=0.0)
    cache.serve(A, KVHints(session_id="a"))
    answer = cache.hint(HintAction.PIN, session_id="a", ttl_s=5.0)
    assert answer == HintAnswer(0, 12, HintRefusal.OVER_QUOTA)
