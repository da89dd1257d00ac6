"""Hints, questions about the cache, timing and events, from the callers' side of the engine."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.engine.byte_vocabulary import ByteVocabulary
from tests.engine.replay_runner import ReplayRunner
from tests.engine.small_engine import ask, make_engine, replay, run
from tests.engine.test_async_engine import built, collect
from tests.fakes.hinted_cache import HintedCacheFake

from moestro.core.kv_events import KVEvent, PagesRemoved
from moestro.core.kv_hints import (
    HintAction,
    HintAnswer,
    HintRefusal,
    KVHints,
    MissReason,
    PrefixUse,
)
from moestro.core.kv_stats import KVTierStats
from moestro.core.messages import KVAnswer, SequenceDelta
from moestro.core.outputs import RequestTiming
from moestro.core.request import Request
from moestro.core.sampling_params import SamplingParams
from moestro.core.step import Schedule, StepOutput
from moestro.engine.async_engine import AsyncEngine
from moestro.engine.command_answers import CommandAnswers
from moestro.engine.request_progress import RequestProgress
from moestro.engine.request_stream import RequestStream
from moestro.errors import EngineDeadError, RequestError


class EventList:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.told: list[Sequence[KVEvent]] = []
        self.closed = False

    def publish(self, events: Sequence[KVEvent]) -> None:
        self.told.append(events)

    def counts(self) -> tuple[int, int]:
        return len(self.told), 0

    def close(self) -> None:
        self.closed = True


ONE = SamplingParams(max_tokens=1)


def engine_around(cache: HintedCacheFake | None) -> AsyncEngine:
    return AsyncEngine(built(replay(b"abc", broken_at=50), cache=cache))


@pytest.mark.parametrize("action", list(HintAction))
def test_a_hint_reaches_the_cache_and_its_answer_comes_back(action: HintAction) -> None:
    ttl_s = 60.0 if action in (HintAction.PIN, HintAction.PREFETCH) else None

    async def scenario() -> None:
        cache = HintedCacheFake()
        async with engine_around(cache) as engine:
            by_session = await engine.hint(action, session_id="known", ttl_s=ttl_s)
            by_tokens = await engine.hint(action, [5] * 9, ttl_s=ttl_s, cache_salt="me")
        assert (by_session.accepted, by_session.clipped, by_session.refused) == (8, 2, None)
        assert (by_tokens.accepted, by_tokens.clipped) == (8, 1)
        assert (by_tokens.expires_at is None) == (ttl_s is None)
        assert [h.action for h in cache.hints] == [action] * 2
        assert (cache.hints[1].token_ids, cache.hints[1].cache_salt) == ((5,) * 9, "me")

    asyncio.run(scenario())


def test_hints_are_taken_while_requests_run() -> None:
    async def scenario() -> None:
        async with engine_around(HintedCacheFake()) as engine:
            work = [collect(engine.generate([1, 0], SamplingParams(max_tokens=30)))] * 1
            hints = [engine.hint(HintAction.DROP, [9] * (4 + n)) for n in range(20)]
            outputs, *answers = await asyncio.gather(*work, *hints)
        assert outputs[-1].finished
        assert [a.accepted + a.clipped for a in answers] == [4 + n for n in range(20)]

    asyncio.run(scenario())


def test_what_the_cache_refuses_is_an_answer_not_an_error() -> None:
    async def scenario() -> None:
        async with engine_around(HintedCacheFake()) as engine:
            answer = await engine.hint(HintAction.DEMOTE, session_id="nobody")
        assert answer == HintAnswer(refused=HintRefusal.UNKNOWN_SESSION)
        async with engine_around(None) as engine:
            answer = await engine.hint(HintAction.DROP, [5, 6])
            assert answer == HintAnswer(clipped=2, refused=HintRefusal.CACHING_OFF)
            assert (await engine.explain([5, 6]))[1] == PrefixUse(miss=MissReason.CACHING_OFF)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"action": HintAction.PIN, "session_id": "known"}, "pin needs ttl_s"),
        ({"action": HintAction.PIN, "session_id": "known", "ttl_s": -3}, "got -3"),
        ({"action": HintAction.PIN, "session_id": "known", "ttl_s": 10**400}, "got <int|got 1000"),
        ({"action": HintAction.PIN, "session_id": "known", "ttl_s": float("nan")}, "got nan"),
        ({"action": HintAction.PIN, "session_id": "known", "ttl_s": float("inf")}, "got inf"),
        ({"action": HintAction.PIN, "session_id": "known", "ttl_s": True}, "number of seconds"),
        ({"action": "burn", "session_id": "known"}, "one of pin, prefetch, demote, drop"),
        ({"action": HintAction.DROP, "session_id": "known", "cache_salt": 5}, "must be text"),
        ({"action": HintAction.DROP, "session_id": 5}, "must be text"),
        ({"action": HintAction.DROP, "session_id": "\ud800"}, "printable"),
        ({"action": HintAction.DROP}, "either a session_id or a prompt"),
        ({"action": HintAction.DROP, "prompt": []}, "empty"),
        ({"action": HintAction.DROP, "prompt": [ByteVocabulary.SIZE]}, "out of vocabulary"),
        ({"action": HintAction.DROP, "prompt": [5] * 500}, "context"),
        ({"action": HintAction.DROP, "prompt": [13, 5]}, "13 does not fit"),
    ],
)
def test_a_wrong_hint_raises_and_the_engine_lives(arguments: dict[str, Any], words: str) -> None:
    async def scenario() -> None:
        async with engine_around(HintedCacheFake()) as engine:
            with pytest.raises(RequestError, match=words):
                await engine.hint(**arguments)
            assert (await collect(engine.generate([0], ONE)))[-1].finished

    asyncio.run(scenario())


def test_a_prompt_is_explained() -> None:
    async def scenario() -> None:
        cache = HintedCacheFake()
        async with engine_around(cache) as engine:
            num_tokens, found = await engine.explain([7] * 20, cache_salt="me")
        assert cache.asked == [((7,) * 20, "me")]
        assert (num_tokens, found.num_cached_tokens) == (20, 12)
        assert (found.miss, found.first_difference) == (MissReason.DIFFERS, 12)

    asyncio.run(scenario())


def test_who_waits_for_an_answer_hears_when_the_engine_dies() -> None:
    async def scenario() -> None:
        answers = CommandAnswers()

        class Silent:
            def send(self, message: object) -> None:
                self.sent = message

        waiting = asyncio.ensure_future(answers.ask(Silent(), None))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        answers.deliver(KVAnswer(99))  # nobody's
        answers.fail("it broke")
        with pytest.raises(EngineDeadError, match="it broke"):
            await asyncio.wait_for(waiting, 5)
        engine = engine_around(HintedCacheFake())
        await engine.close()
        with pytest.raises(EngineDeadError):
            await engine.hint(HintAction.DROP, [5])

    asyncio.run(scenario())


def test_events_are_told_after_steps_and_hints() -> None:
    cache = HintedCacheFake()
    sink = EventList()
    engine = make_engine(replay(b"ab"), cache=cache, event_sink=sink)
    event = PagesRemoved((b"x",), "device")
    cache.events = [event]
    run(engine, ask("a", [0], max_tokens=2))
    assert sink.told == [[event]]
    engine.close()
    assert sink.closed


def test_statistics_of_the_tiers_come_with_the_others() -> None:
    cache = HintedCacheFake(stats=KVTierStats(num_pins=3))
    engine = make_engine(replay(b"a"), cache=cache)
    assert engine.stats().kv == KVTierStats(num_pins=3)
    assert make_engine(replay(b"a")).stats().kv is None


class Clock:
    """A second passes whenever somebody looks."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1
        return self.now_s


def test_the_last_output_has_the_timing() -> None:
    engine = make_engine(replay(b"abc"), clock=Clock())
    prompt = [*range(20), 0]
    first = run(engine, ask("a", prompt, max_tokens=2, n=2))["a"].timing
    again = run(engine, ask("b", prompt, max_tokens=2))["b"].timing
    assert first is not None
    assert again is not None
    assert first.prefix.num_cached_tokens == 0
    assert again.prefix.device_tokens == 20
    assert again.first_token_s == again.queue_s + (again.prefill_s or 0)
    assert again.decode_s is not None
    assert again.decode_s > 0


def test_loads_of_the_first_step_are_part_of_the_timing() -> None:
    class Loading(ReplayRunner):
        def execute(self, schedule: Schedule) -> StepOutput:
            return replace(super().execute(schedule), load_s=0.25)

    engine = make_engine(Loading({0: b"abc"}))
    request = ask("a", [*range(20), 0], max_tokens=2)
    nothing_below = run(engine, request)["a"].timing
    assert nothing_below is not None
    assert nothing_below.prefix.load_host_s == 0
    admit = engine._scheduler._kv.admit

    def from_the_host(seq: Any, *options: Any) -> bool:
        admitted = admit(seq, *options)
        seq.prefix = PrefixUse(host_tokens=20)
        return admitted

    engine._scheduler._kv.admit = from_the_host  # type: ignore[method-assign]
    timing = run(engine, request)["a"].timing
    assert timing is not None
    assert timing.prefix == PrefixUse(host_tokens=20, load_host_s=0.25)


def test_aborted_requests_tell_what_is_known() -> None:
    engine = make_engine(replay(b"abc"))
    progresses = {}
    for name in ("running", "waiting"):
        request = ask(name, [*range(30), 0])
        progresses[name] = RequestProgress(request)
        engine.add_request(request)
    engine.step()
    engine.abort("running")
    engine.abort("waiting")
    for delta in engine.step().deltas:
        progresses[delta.request_id].add(delta)
    running, waiting = (progresses[name].output().timing for name in ("running", "waiting"))
    assert running is not None
    assert running.prefill_s is None
    assert waiting is None


def test_timing_and_answer_survive_a_slow_reader() -> None:
    async def scenario() -> None:
        timing, answer = RequestTiming(1.0), HintAnswer(8, 1)
        stream = RequestStream(asyncio.get_running_loop())
        stream.put(SequenceDelta("r", 0, (1,), "a"))
        stream.put(SequenceDelta("r", 0, (2,), "b", timing=timing, hint_answer=answer))
        (taken,) = await stream.take()
        assert taken.timing is timing
        assert taken.hint_answer is answer

    asyncio.run(scenario())


def test_hints_travel_with_the_request() -> None:
    hints = KVHints(session_id="s", pin_ttl_s=5.0)

    async def scenario() -> None:
        made = built(replay(b"abc"))
        seen: list[Request] = []
        add = made.engine.add_request

        def watch(request: Request) -> None:
            seen.append(request)
            add(request)

        made.engine.add_request = watch  # type: ignore[method-assign]
        async with AsyncEngine(made) as engine:
            await collect(engine.generate([0], ONE, kv_hints=hints))
        assert [r.kv_hints for r in seen] == [hints]

    asyncio.run(scenario())
