"""Steps on a thread of their own: in order, failures where they are collected, clean ends."""

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from tests.engine.small_engine import PAGE_SIZE, ask, deltas_of, run
from tests.fakes.scripted_runner import Script, ScriptedRunner

from moestro.core.request import FinishReason
from moestro.core.step import Schedule, StepOutput
from moestro.engine.engine import Engine
from moestro.engine.step_pipeline import InlineSteps, StepPipeline, ThreadedSteps
from moestro.engine.step_times import StepTimes
from moestro.kvcache.manager import KVCacheManager
from moestro.scheduler import FixedDrafts, Scheduler, SchedulerLimits


class Held:
    """A runner whose steps wait for permits; `begun` says that one has come to it."""

    def __init__(self, permits: int = 0, broken_at: int | None = None) -> None:
        self.permits = threading.Semaphore(permits)
        self.begun = threading.Semaphore(0)
        self.broken_at = broken_at
        self.executed: list[int] = []
        self.closed = False

    def execute(self, schedule: Schedule) -> StepOutput:
        assert not self.closed
        self.begun.release()
        assert self.permits.acquire(timeout=30)
        if schedule.step_id == self.broken_at:
            raise RuntimeError(f"step {schedule.step_id} broke")
        self.executed.append(schedule.step_id)
        return StepOutput(schedule.step_id, (), began_s=1.0, ended_s=2.0)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(params=[InlineSteps, ThreadedSteps])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[Held], StepPipeline]]:
    made = []

    def build(runner: Held) -> StepPipeline:
        made.append(request.param(runner))
        return made[-1]

    yield build
    for pipeline in made:
        pipeline.close()


def schedules(count: int) -> list[Schedule]:
    return [Schedule(n, ()) for n in range(count)]


def test_outputs_come_in_order(make: Callable[[Held], StepPipeline]) -> None:
    runner = Held(permits=9)
    pipeline = make(runner)
    for schedule in schedules(5):
        pipeline.submit(schedule)
    assert [pipeline.collect().step_id for _ in range(5)] == runner.executed == [0, 1, 2, 3, 4]
    pipeline.close()
    pipeline.close()


def test_a_step_begins_while_the_one_before_is_not_collected() -> None:
    runner = Held(permits=1)
    pipeline = ThreadedSteps(runner)
    for schedule in schedules(2):
        pipeline.submit(schedule)
    for _ in range(2):
        assert runner.begun.acquire(timeout=30)
    assert runner.executed == [0]
    runner.permits.release()
    assert [pipeline.collect().step_id for _ in range(2)] == [0, 1]
    pipeline.close()


def test_a_failure_is_raised_where_it_is_collected_and_nothing_runs_after_it() -> None:
    runner = Held(permits=9, broken_at=1)
    pipeline = ThreadedSteps(runner)
    for schedule in schedules(3):
        pipeline.submit(schedule)
    assert pipeline.collect().step_id == 0
    for _ in range(2):
        with pytest.raises(RuntimeError, match="step 1 broke"):
            pipeline.collect()
    assert runner.executed == [0]
    pipeline.close()


def test_close_waits_for_what_runs_and_drops_the_rest() -> None:
    runner = Held()
    pipeline = ThreadedSteps(runner)
    for schedule in schedules(2):
        pipeline.submit(schedule)
    assert runner.begun.acquire(timeout=30)
    closing = threading.Thread(target=pipeline.close)
    closing.start()
    assert closing.is_alive()
    runner.permits.release(2)
    closing.join(30)
    assert not closing.is_alive()
    assert runner.executed == [0]
    with pytest.raises(RuntimeError, match="closed"):
        pipeline.submit(Schedule(2, ()))
    assert pipeline.collect().step_id == 0
    for _ in range(2):  # nobody waits for what was dropped
        with pytest.raises(RuntimeError, match="closed"):
            pipeline.collect()


def test_a_dropped_pipeline_ends_its_thread_and_lets_go_of_the_runner() -> None:
    runner = Held(permits=9)
    pipeline = ThreadedSteps(runner)
    pipeline.submit(Schedule(0, ()))
    pipeline.collect()
    thread = pipeline._workers[0].thread  # type: ignore[union-attr]
    gone = weakref.ref(runner)
    del pipeline, runner
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    assert gone() is None


def test_collect_without_a_schedule_says_so() -> None:
    with pytest.raises(RuntimeError, match="no schedule"):
        ThreadedSteps(Held()).collect()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_thread_of_its_own() -> None:
    runner = Held(permits=9)
    pipeline = ThreadedSteps(runner)
    pipeline.submit(Schedule(0, ()))
    pipeline.collect()
    child = os.fork()
    if child == 0:
        try:
            pipeline.submit(Schedule(1, ()))
            os._exit(pipeline.collect().step_id)
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    pipeline.close()


# --- the engine around it ----------------------------------------------------------------------


def make_engine(
    runner: ScriptedRunner | Held, max_steps_ahead: int, num_drafts: int = 0, **options: object
) -> Engine:
    scheduler = Scheduler(
        SchedulerLimits(8, 16, 200, max_steps_ahead),
        KVCacheManager(64, PAGE_SIZE),
        vocab_size=256,
        drafts=FixedDrafts(num_drafts) if num_drafts else None,
    )
    return Engine(scheduler, runner, None, **options)  # type: ignore[arg-type]


def scripted(max_steps_ahead: int = 1) -> ScriptedRunner:
    return ScriptedRunner(64, PAGE_SIZE, Script(256), max_steps_ahead=max_steps_ahead)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_same_output_as_without_planning_ahead(num_drafts: int) -> None:
    requests = [ask(str(n), [n, n + 1] * (n + 1), max_tokens=5 + n, n=1 + n % 2) for n in range(6)]
    told = []
    for ahead in (0, 1):
        times: list[StepTimes] = []
        engine = make_engine(scripted(ahead), ahead, num_drafts, observer=times.append)
        outputs = run(engine, *requests)
        told.append([(o.request_id, [c.token_ids for c in o.outputs]) for o in outputs.values()])
        assert [t.step_id for t in times] == list(range(len(times)))
        assert all(t.planned[0] <= t.planned[1] <= t.applied[0] <= t.applied[1] for t in times)
        if ahead:
            assert any(b.planned[1] < a.applied[0] for a, b in pairwise(times))
        engine.close()
    assert told[0] == told[1]


def test_an_abort_while_a_step_runs_is_told_at_once_and_its_results_are_skipped() -> None:
    engine = make_engine(scripted(), 1)
    engine.add_request(ask("a", [1, 2, 3], max_tokens=20))
    engine.add_request(ask("b", [4], max_tokens=3))
    engine.step()
    engine.abort("a")
    told = deltas_of(engine)
    assert [d.finish_reason for d in told if d.request_id == "a"] == [FinishReason.ABORT]
    assert sum(len(d.token_ids) for d in told if d.request_id == "b") in (2, 3)
    assert not engine.has_work()
    assert engine.stats().num_pages_used == 0
    engine.close()


def test_close_with_a_step_in_flight() -> None:
    runner = scripted()
    engine = make_engine(runner, 1)
    engine.add_request(ask("a", [1, 2, 3], max_tokens=20))
    engine.step()
    assert engine.has_work()
    engine.close()
    assert runner.known_sequences == set()
    assert not any(t.name == "moestro-steps" and t.is_alive() for t in threading.enumerate())


def test_abort_all_leaves_an_engine_that_goes_on() -> None:
    engine = make_engine(scripted(), 1)
    engine.add_request(ask("a", [1, 2, 3], max_tokens=20))
    engine.step()
    engine.abort_all()
    engine.discard_pending()
    outputs = run(engine, ask("b", [7, 8], max_tokens=4))
    assert len(outputs["b"].outputs[0].token_ids) == 4
    engine.close()


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_the_runner_raises_comes_out_of_step(ahead: int) -> None:
    runner = Held(permits=9, broken_at=0)
    engine = make_engine(runner, ahead)
    engine.add_request(ask("a", [1, 2, 3], max_tokens=20))
    with pytest.raises(RuntimeError, match="step 0 broke"):
        engine.step()
    engine.close()
    assert runner.closed
