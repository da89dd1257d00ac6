"""The virtual device: the engine's overlap on a clock that only the test moves."""

import time
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.small_engine import PAGE_SIZE, ask, run
from tests.fakes.scripted_runner import Script, ScriptedRunner

from moestro.core.request import FinishReason, Request
from moestro.core.step import Schedule
from moestro.engine.engine import Engine
from moestro.engine.request_progress import RequestProgress
from moestro.engine.step_times import StepTimes
from moestro.kvcache.manager import KVCacheManager
from moestro.scheduler import FixedDrafts, Scheduler, SchedulerLimits
from moestro.simulator.clock import VirtualClock
from moestro.simulator.virtual_device import ScriptedSpeech, VirtualDevice, VirtualSteps


def scheduler(max_steps_ahead: int, num_drafts: int = 0, num_pages: int = 64) -> Scheduler:
    return Scheduler(
        SchedulerLimits(8, 16, 100, max_steps_ahead),
        KVCacheManager(num_pages, PAGE_SIZE),
        vocab_size=256,
        drafts=FixedDrafts(num_drafts) if num_drafts else None,
    )


def test_speech_depends_on_seed_and_position_only() -> None:
    spoken = []
    for acceptance, num_drafts, ahead in ((0.0, 0, 0), (1.0, 3, 0), (0.6, 3, 1), (0.6, 2, 0)):
        device = VirtualDevice(lambda _: 0.0, ScriptedSpeech(acceptance=acceptance))
        engine = Engine(scheduler(ahead, num_drafts), device)
        output = run(engine, ask("a", [1, 2, 3], max_tokens=40, n=2))["a"]
        spoken.append([each.token_ids for each in output.outputs])
        engine.close()
    assert all(each == spoken[0] for each in spoken)
    assert spoken[0][0] != spoken[0][1]


def test_acceptance_is_as_asked_for() -> None:
    times: list[StepTimes] = []
    device = VirtualDevice(lambda _: 0.0, ScriptedSpeech(acceptance=0.75))
    engine = Engine(scheduler(0, 1, num_pages=300), device, observer=times.append)
    for n in range(8):
        engine.add_request(ask(str(n), [n], max_tokens=90))
    while engine.has_work():
        engine.step()
    engine.close()
    num_runs = sum(t.num_sequences for t in times)
    assert 1.65 < 8 * 90 / num_runs < 1.85


def test_the_real_device_takes_its_time() -> None:
    device = VirtualDevice(lambda schedule: 0.002 * len(schedule.sequences))
    engine = Engine(scheduler(1), device)
    began_s = time.monotonic()
    run(engine, ask("a", [1], max_tokens=5))
    assert time.monotonic() - began_s >= 0.01
    engine.close()


def test_on_the_virtual_clock_planning_ahead_hides_the_host_exactly() -> None:
    """Steps of 10 ms and 4 ms of host work a step: 14 ms in turn, 10 ms ahead."""
    took = []
    for ahead in (0, 1):
        clock = VirtualClock()
        steps = VirtualSteps(ScriptedSpeech(), clock, lambda _: 0.010)
        engine = Engine(scheduler(ahead), ScriptedSpeech(), None, clock, pipeline=steps)
        engine.add_request(ask("a", [1], max_tokens=20))
        while engine.has_work():
            engine.step()
            clock.advance(0.004)
        took.append(clock.now_s)
        assert round(steps.device_busy_s, 9) == 0.2
        engine.close()
    assert [round(seconds, 9) for seconds in took] == [0.28, 0.204]


@dataclass
class Event:
    at_s: float
    request: Request | None = None
    aborts: str | None = None


@st.composite
def events(draw: st.DrawFn) -> list[Event]:
    """Arrivals and aborts at any time of the first steps."""
    found = []
    for n in range(draw(st.integers(1, 6))):
        at_s = draw(st.integers(0, 60)) / 1000
        prompt = [1, 2, 3] * draw(st.integers(1, 4)) + [draw(st.integers(0, 3))]
        request = ask(f"r{n}", prompt, max_tokens=draw(st.integers(1, 14)), n=1 + n % 2)
        found.append(Event(at_s, request))
        if draw(st.integers(0, 3)) == 0:
            found.append(Event(at_s + draw(st.integers(0, 60)) / 1000, aborts=f"r{n}"))
    return sorted(found, key=lambda event: event.at_s)


@dataclass
class Circumstances:
    """What a step takes, what the engine's own work beside it takes, and what it does with them."""

    num_drafts: int
    acceptance: float
    num_pages: int
    host_s: float
    row_s: float

    def step_s(self, schedule: Schedule) -> float:
        return 0.005 + self.row_s * schedule.num_tokens

    def play(self, happenings: list[Event], ahead: int) -> tuple[dict[str, RequestProgress], float]:
        """What was said, and when it was over."""
        clock = VirtualClock()
        script = Script(256, acceptance=self.acceptance)
        runner = ScriptedRunner(self.num_pages, PAGE_SIZE, script, max_steps_ahead=ahead)
        steps = VirtualSteps(runner, clock, self.step_s)
        planner = scheduler(ahead, self.num_drafts, self.num_pages)
        engine = Engine(planner, runner, None, clock, pipeline=steps)
        progress: dict[str, RequestProgress] = {}
        waiting = list(happenings)
        while waiting or engine.has_work():
            if not engine.has_work():
                clock.advance_to(waiting[0].at_s)
            while waiting and waiting[0].at_s <= clock.now_s:
                _happen(engine, waiting.pop(0), progress)
            if engine.has_work():
                for delta in engine.step().deltas:
                    progress[delta.request_id].add(delta)
            clock.advance(self.host_s)
        assert engine.stats().num_pages_used == 0
        engine.close()
        return progress, clock.now_s


def _happen(engine: Engine, event: Event, progress: dict[str, RequestProgress]) -> None:
    if event.request is not None:
        progress[event.request.request_id] = RequestProgress(event.request)
        engine.add_request(event.request)
    elif event.aborts is not None:
        engine.abort(event.aborts)


@settings(max_examples=60)
@given(
    happenings=events(),
    circumstances=st.builds(
        Circumstances,
        num_drafts=st.sampled_from([0, 2, 5]),
        acceptance=st.sampled_from([0.0, 0.5, 1.0]),
        num_pages=st.sampled_from([9, 12, 64]),
        host_s=st.sampled_from([0.0, 0.003, 0.02]),
        row_s=st.sampled_from([0.0, 0.002]),
    ),
)
def test_every_interleaving_gives_the_same_tokens(
    happenings: list[Event], circumstances: Circumstances
) -> None:
    """Whatever arrives, aborts, is preempted or rejected while a step runs; and twice the same."""
    in_turn, _ = circumstances.play(happenings, 0)
    ahead, took_s = circumstances.play(happenings, 1)
    assert circumstances.play(happenings, 1)[1] == took_s
    for name, progress in in_turn.items():
        for one, other in zip(progress.output().outputs, ahead[name].output().outputs, strict=True):
            if FinishReason.ABORT in (one.finish_reason, other.finish_reason):
                length = min(len(one.token_ids), len(other.token_ids))
                assert one.token_ids[:length] == other.token_ids[:length]
            else:
                assert one.token_ids == other.token_ids
                assert one.finish_reason == other.finish_reason
