"""Requests over three tiers: every prefix is found again, and no token depends on where."""

from tests.fakes.fake_mover import FakeMover
from tests.scheduler.loop import Loop, make_request
from tests.scheduler.test_scheduler import assert_as_expected, runs

from moestro.core.page_moves import MoveKind
from moestro.kvcache.tier_policy import TierConfig, WritePolicy

PROMPT = list(range(1, 22))  # 5 pages of 4 and a token
OTHER = [30 + i % 7 for i in range(21)]


def tiered(num_pages: int = 8, num_slots: int = 64, **options: object) -> tuple[Loop, FakeMover]:
    mover = FakeMover(has_store=bool(options.pop("store", False)))
    tiers = TierConfig(
        num_host_slots=num_slots,
        move_chunk_bytes=2,
        **options,  # type: ignore[arg-type]
    )
    return Loop(num_pages=num_pages, mover=mover, tiers=tiers), mover


def serve(loop: Loop, mover: FakeMover, name: str, prompt: list[int], max_tokens: int = 1) -> int:
    """Run one request to its end and let everything sink; its cached tokens."""
    request = make_request(name, prompt, max_tokens=max_tokens)
    loop.add(request)
    loop.run()
    assert_as_expected(loop, request)
    settle(loop, mover)
    return loop.results[name, 0].num_cached_tokens


def settle(loop: Loop, mover: FakeMover) -> None:
    while loop.scheduler.tend() or mover.queued:
        mover.finish_all()
    loop.check()


def test_what_the_device_evicted_is_loaded_from_the_host() -> None:
    loop, mover = tiered()
    assert serve(loop, mover, "a", PROMPT) == 0
    assert serve(loop, mover, "b", OTHER) == 0  # evicts a
    assert serve(loop, mover, "c", PROMPT) == 20
    loads = [schedule.loads for schedule in loop.runner.schedules if schedule.loads]
    assert sum(len(load.pages) for load in loads[0]) >= 2
    assert {move.kind for move in mover.submitted} == {MoveKind.SAVE}


def test_what_another_engine_stored_is_fetched() -> None:
    loop, mover = tiered(store=True)
    serve(loop, mover, "a", PROMPT)
    assert len(mover.store) == 5
    again, second = tiered(store=True)
    second.store = mover.store
    assert serve(again, second, "b", PROMPT) == 20
    kinds = [move.kind for move in second.submitted]
    assert kinds.count(MoveKind.FETCH) == 3  # 2 + 2 + 1 pages
    assert MoveKind.PUT not in kinds  # it is there already
    prefix = again.results["b", 0]
    assert prefix.num_cached_tokens == 20


def test_generated_tokens_sink_too() -> None:
    loop, mover = tiered(store=True)
    serve(loop, mover, "a", [1, 2, 3], max_tokens=15)
    assert len(mover.store) == 4  # 3 + 14 computed tokens


def test_others_pass_a_sequence_that_waits_for_the_store() -> None:
    loop, mover = tiered(store=True)
    serve(loop, mover, "a", PROMPT)
    serve(loop, mover, "b", OTHER)
    loop, second = tiered(num_pages=16, store=True)
    second.store = mover.store
    loop.add(make_request("a", PROMPT, max_tokens=2), make_request("new", [7, 7], max_tokens=2))
    assert runs(loop.step()) == [(1, 0, 2)]
    assert loop.scheduler.stats().num_waiting == 1
    loop.run()
    assert loop.results["a", 0].num_cached_tokens == 20


def test_a_step_with_nothing_but_waits_computes_nothing() -> None:
    loop, mover = tiered(store=True)
    serve(loop, mover, "a", PROMPT)
    loop, second = tiered(store=True)
    second.store = mover.store
    loop.add(make_request("a", PROMPT))
    assert loop.scheduler.schedule() is None
    assert loop.scheduler.has_work()
    loop.scheduler.abort("a")
    settle(loop, second)
    assert not loop.scheduler.has_work()


def test_write_back_saves_before_the_device_has_to_evict() -> None:
    loop, mover = tiered(write_policy=WritePolicy.WRITE_BACK, low_water=0.3, high_water=0.5)
    serve(loop, mover, "a", PROMPT[:9])
    assert mover.submitted == []
    serve(loop, mover, "b", OTHER)
    assert mover.submitted
    assert serve(loop, mover, "c", PROMPT[:9]) == 8


def test_selective_waits_for_the_second_hit() -> None:
    loop, mover = tiered(write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE)
    serve(loop, mover, "a", PROMPT)
    serve(loop, mover, "b", PROMPT)
    assert mover.submitted == []
    serve(loop, mover, "c", PROMPT)
    assert sum(len(move.pages) for move in mover.submitted) == 5


def test_a_staging_area_keeps_nothing() -> None:
    loop, mover = tiered(store=True, keeps_host=False, num_slots=6)
    serve(loop, mover, "a", PROMPT)
    serve(loop, mover, "b", OTHER)
    assert loop.kv._below.host.allocator.num_taken == 0
    assert len(mover.store) == 10
    assert serve(loop, mover, "c", PROMPT) == 20


def test_a_lossy_host_never_feeds_the_store() -> None:
    loop, mover = tiered(store=True, host_is_lossy=True)
    serve(loop, mover, "a", PROMPT)
    assert not mover.store
    assert {move.kind for move in mover.submitted} <= {MoveKind.SAVE, MoveKind.LOOKUP}


def test_a_mover_that_refuses_everything_costs_nothing_but_the_sink() -> None:
    loop, mover = tiered(store=True)
    mover.max_moves = 0
    assert serve(loop, mover, "a", PROMPT) == 0
    assert serve(loop, mover, "b", PROMPT) == 20
    assert loop.kv._below.sinker.num_dropped_pages > 0


def test_a_store_that_never_answers_costs_the_deadline() -> None:
    now = [0.0]
    mover = FakeMover()
    loop = Loop(
        mover=mover,
        tiers=TierConfig(num_host_slots=8, move_chunk_bytes=2, fetch_timeout_s=1.0),
        clock=lambda: now[0],
    )
    loop.add(make_request("a", PROMPT, max_tokens=1))
    assert loop.scheduler.schedule() is None
    now[0] = 0.99
    assert loop.scheduler.schedule() is None
    now[0] = 1.0
    assert runs(loop.step()) == [(0, 0, 21)]
    assert mover.cancelled == {0}
    assert loop.results["a", 0].finish_reason is not None
