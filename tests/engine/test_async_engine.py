"""Requests as asynchronous iterators over an engine on its own thread."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from tests.engine.byte_vocabulary import ByteVocabulary
from tests.engine.replay_runner import ReplayRunner
from tests.engine.small_engine import make_engine, replay

from moestro.chat.templates import ChatTemplate
from moestro.config import EngineConfig
from moestro.core.messages import SequenceDelta, StepReport
from moestro.core.outputs import RequestOutput
from moestro.core.request import FinishReason
from moestro.core.sampling_params import SamplingParams
from moestro.core.step import Schedule, StepOutput
from moestro.engine.async_engine import AsyncEngine
from moestro.engine.built_engine import BuiltEngine
from moestro.engine.input_processor import InputLimits, InputProcessor
from moestro.engine.request_stream import RequestStream
from moestro.errors import EngineDeadError, RequestError

LONG = SamplingParams(max_tokens=150)


def built(runner: Any, **options: Any) -> BuiltEngine:
    limits = InputLimits(ByteVocabulary.SIZE, max_model_len=200, kv_tokens=256)
    return BuiltEngine(
        config=EngineConfig(),
        spec=None,  # type: ignore[arg-type]
        plan=None,  # type: ignore[arg-type]
        engine=make_engine(runner, **options),
        processor=InputProcessor(limits, None, eos_token_ids=[ByteVocabulary.EOS], engine_seed=0),
        chat_template=ChatTemplate(None),
    )


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


@dataclass
class GatedRunner(ReplayRunner):
    """A runner whose steps wait until the test lets them go."""

    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def execute(self, schedule: Schedule) -> StepOutput:
        assert self.gate.acquire(timeout=60)
        return super().execute(schedule)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never happened")


def test_outputs_are_cumulative_and_end_finished() -> None:
    async def scenario() -> None:
        async with AsyncEngine(built(replay([*b"hello", ByteVocabulary.EOS]))) as engine:
            outputs = await collect(engine.generate([1, 0], LONG, "mine"))
        texts = [o.outputs[0].text for o in outputs]
        assert all(b.startswith(a) for a, b in pairwise(texts))
        assert texts[-1] == "hello"
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].request_id == "mine"
        assert outputs[-1].outputs[0].finish_reason is FinishReason.STOP

    asyncio.run(scenario())


def test_outputs_are_not_copied_at_every_token() -> None:
    async def scenario() -> None:
        params = SamplingParams(max_tokens=4, logprobs=0)
        async with AsyncEngine(built(GatedRunner({0: b"abcd"}, gate=threading.Semaphore(99)))) as e:
            outputs = e.generate([7, 0], params)
            first = await anext(outputs)
            ids, so_far = first.outputs[0].token_ids, list(first.outputs[0].token_ids)
            last = (await collect(outputs) or [first])[-1]
        assert last.outputs[0].token_ids is ids
        assert last.prompt_token_ids is first.prompt_token_ids
        assert ids == [*b"abcd"]
        assert so_far == ids[: len(so_far)]

    asyncio.run(scenario())


def test_many_requests_and_several_samples_at_once() -> None:
    async def scenario() -> None:
        async with AsyncEngine(built(replay(b"zero", b"one!", b"two!"))) as engine:
            params = SamplingParams(max_tokens=4, n=2)
            found = await asyncio.gather(*(collect(engine.generate([i], params)) for i in range(3)))
        texts = [[c.text for c in outputs[-1].outputs] for outputs in found]
        assert texts == [["zero"] * 2, ["one!"] * 2, ["two!"] * 2]

    asyncio.run(scenario())


def test_bad_requests_raise_and_ids_are_unique_while_in_use() -> None:
    async def scenario() -> None:
        runner = GatedRunner({0: b"abc"})
        engine = AsyncEngine(built(runner))
        with pytest.raises(RequestError, match="empty"):
            await collect(engine.generate([], LONG))
        first = engine.generate([0], SamplingParams(max_tokens=1), "same")
        pending = asyncio.ensure_future(anext(first))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="in use"):
            await collect(engine.generate([0], LONG, "same"))
        runner.gate.release(100)
        assert (await pending).finished
        await first.aclose()
        await engine.close()

    asyncio.run(scenario())


def test_leaving_the_iterator_aborts_the_request() -> None:
    async def scenario() -> None:
        runner = GatedRunner({0: b"x" * 100})
        engine = AsyncEngine(built(runner))
        runner.gate.release(3)
        outputs = engine.generate([0], LONG)
        assert not (await anext(outputs)).finished
        await outputs.aclose()
        runner.gate.release(1000)
        await until(lambda: engine.stats.num_running == 0 and engine.stats.num_steps > 0)
        assert engine.stats.generation_tokens < 10
        await engine.close()

    asyncio.run(scenario())


def test_cancelling_the_task_aborts_the_request() -> None:
    async def scenario() -> None:
        runner = GatedRunner({0: b"x" * 100})
        engine = AsyncEngine(built(runner))
        task = asyncio.create_task(collect(engine.generate([0], LONG)))
        runner.gate.release(3)
        await until(lambda: engine.stats.generation_tokens >= 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        runner.gate.release(1000)
        await until(lambda: engine.stats.num_running == 0)
        assert engine.stats.generation_tokens < 10
        await engine.close()

    asyncio.run(scenario())


def test_abort_ends_the_iterator() -> None:
    async def scenario() -> None:
        runner = GatedRunner({0: b"x" * 100})
        engine = AsyncEngine(built(runner))
        task = asyncio.create_task(collect(engine.generate([0], LONG, "r")))
        runner.gate.release(3)
        await until(lambda: engine.stats.generation_tokens >= 3)
        engine.abort("r")
        engine.abort("unknown")
        runner.gate.release(1000)
        outputs = await task
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason is FinishReason.ABORT
        await engine.close()

    asyncio.run(scenario())


def test_a_broken_engine_tells_everybody() -> None:
    async def scenario() -> None:
        engine = AsyncEngine(built(replay(b"x" * 100, b"y" * 100, broken_at=3)))
        found = await asyncio.gather(
            *(collect(engine.generate([i], LONG)) for i in range(2)), return_exceptions=True
        )
        assert all(isinstance(e, EngineDeadError) for e in found)
        assert "the runner broke" in str(found[0])
        assert engine.is_dead
        with pytest.raises(EngineDeadError, match="the runner broke"):
            await collect(engine.generate([0], LONG))
        engine.abort("x")
        await engine.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("drain", [True, False])
def test_close_drains_or_aborts(drain: bool) -> None:
    async def scenario() -> None:
        runner = GatedRunner({0: b"x" * 100})
        engine = AsyncEngine(built(runner))
        task = asyncio.create_task(collect(engine.generate([0], SamplingParams(max_tokens=20))))
        runner.gate.release(3)
        await until(lambda: engine.stats.generation_tokens >= 3)
        closing = asyncio.create_task(engine.close(drain))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError):
            await collect(engine.generate([0], LONG))
        runner.gate.release(1000)
        last = (await task)[-1].outputs[0]
        await closing
        await engine.close()
        assert runner.closed
        assert engine.is_dead
        reason = FinishReason.LENGTH if drain else FinishReason.ABORT
        assert last.finish_reason is reason
        assert (len(last.token_ids) == 20) is drain

    asyncio.run(scenario())


def test_a_dropped_engine_stops_its_threads() -> None:
    engine = AsyncEngine(built(replay(b"x")))
    threads, watch = engine._threads, weakref.ref(engine)
    del engine
    gc.collect()
    assert watch() is None
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_an_idle_engine_uses_no_cpu() -> None:
    async def scenario() -> None:
        async with AsyncEngine(built(replay(b"x"))) as engine:
            await collect(engine.generate([0], SamplingParams(max_tokens=1)))
            before = time.process_time()
            await asyncio.sleep(0.5)
            assert time.process_time() - before < 0.1

    asyncio.run(scenario())


def test_reports_are_shown_to_whoever_asks() -> None:
    async def scenario() -> None:
        seen: list[StepReport] = []
        async with AsyncEngine(built(replay(b"x")), on_report=seen.append) as engine:
            await collect(engine.generate([0], SamplingParams(max_tokens=3)))
        assert sum(r.stats.last_step_tokens for r in seen) == 3

    asyncio.run(scenario())


def test_what_a_slow_reader_leaves_adds_up() -> None:
    async def scenario() -> None:
        stream = RequestStream(asyncio.get_running_loop())
        for i in range(1000):
            stream.put(SequenceDelta("r", i % 2, (i,), str(i % 10)))
        stream.put(SequenceDelta("r", 0, (), "", finish_reason=FinishReason.LENGTH))
        taken = await stream.take()
        assert [d.index for d in taken] == [0, 1]
        assert taken[0].token_ids == tuple(range(0, 1000, 2))
        assert taken[0].text == "02468" * 100
        assert taken[0].finish_reason is FinishReason.LENGTH
        assert len(stream._waiting) == 0

    asyncio.run(scenario())


def test_a_failure_that_arrives_with_deltas_is_not_lost() -> None:
    async def scenario() -> None:
        stream = RequestStream(asyncio.get_running_loop())
        stream.put(SequenceDelta("r", 0, (1,), "a"))
        stream.fail("why")
        await asyncio.sleep(0)
        assert len(await stream.take()) == 1
        with pytest.raises(EngineDeadError, match="why"):
            await asyncio.wait_for(stream.take(), 5)

    asyncio.run(scenario())


def test_engines_serve_several_event_loops() -> None:
    engine = AsyncEngine(built(replay(b"ab")))
    params = SamplingParams(max_tokens=2)
    for _ in range(2):
        outputs = asyncio.run(collect(engine.generate([0], params)))
        assert outputs[-1].outputs[0].text == "ab"
    asyncio.run(engine.close())
