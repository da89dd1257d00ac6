"""The engine while requests wait for lower tiers, and while pages sink without requests."""

import threading

from tests.engine.small_engine import ask
from tests.fakes.fake_mover import FakeMover
from tests.scheduler.loop import Loop

from moestro.core.messages import AddRequest, Shutdown, StepReport
from moestro.core.request import FinishReason
from moestro.engine.channel import channel_pair
from moestro.engine.engine import Engine
from moestro.engine.engine_loop import run_engine_loop
from moestro.kvcache.tier_policy import TierConfig

PROMPT = [*range(1, 21), 0]


def tiered(mover: FakeMover) -> Engine:
    loop = Loop(mover=mover, tiers=TierConfig(num_host_slots=16, move_chunk_bytes=2))
    return Engine(loop.scheduler, loop.runner, cache=loop.kv)


def test_a_step_that_has_to_wait_sleeps_and_tells_nothing() -> None:
    mover = FakeMover()
    waits: list[float] = []
    mover.wait = waits.append
    engine = tiered(mover)
    engine.add_request(ask("a", PROMPT, max_tokens=1))
    for _ in range(3):
        assert engine.step().deltas == ()
    assert len(waits) == 3
    assert 0 < max(waits) <= 0.01
    mover.finish_all()  # nothing is stored
    (delta,) = engine.step().deltas
    assert delta.finish_reason is FinishReason.LENGTH


def test_a_request_that_waits_can_be_aborted() -> None:
    mover = FakeMover()
    engine = tiered(mover)
    engine.add_request(ask("a", PROMPT, max_tokens=1))
    engine.step()
    engine.abort("a")
    (delta,) = engine.step().deltas
    assert delta.finish_reason is FinishReason.ABORT
    assert not engine.has_work()
    mover.finish_all()
    engine.tend()


def test_what_the_last_step_computed_sinks_and_close_waits_for_it() -> None:
    mover = FakeMover()
    engine = tiered(mover)
    engine.add_request(ask("a", PROMPT, max_tokens=1))
    while engine.has_work():
        engine.step()
    assert [move.kind for move in mover.queued] == ["save", "save", "save"]
    engine.close()
    assert mover.queued == []
    assert len(mover.store) == 5


def test_the_loop_lets_pages_sink_while_nobody_asks() -> None:
    mover = FakeMover()
    is_stored = threading.Event()
    finish = mover.finish

    def finish_and_tell(*args: object) -> object:
        result = finish(*args)
        if len(mover.store) == 5:
            is_stored.set()
        return result

    mover.finish = finish_and_tell
    poll = mover.poll

    def poll_and_move() -> object:
        mover.finish_all()
        return poll()

    mover.poll = poll_and_move
    ours, theirs = channel_pair()
    thread = threading.Thread(target=run_engine_loop, args=(tiered(mover), theirs))
    thread.start()
    ours.send(AddRequest(ask("a", PROMPT, max_tokens=1)))
    assert is_stored.wait(30)
    ours.send(Shutdown())
    thread.join(30)
    assert not thread.is_alive()
    assert isinstance(ours.receive(1), StepReport)
