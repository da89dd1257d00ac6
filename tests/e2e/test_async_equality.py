"""Offline and asynchronous give the same, whatever arrives when."""

import asyncio

import pytest
from tests.e2e.models import NAMES, QUANTIZED, model_options
from tests.e2e.workload import NEEDS_KERNELS, Signature, requests, run_together, signature

from moestro import LLM, AsyncEngine, EngineConfig, RequestOutput, SamplingParams

pytestmark = NEEDS_KERNELS

OPTIONS = {
    "max_model_len": 512,
    "page_size": 16,
    "num_threads": 1,
    "kv_cache_memory_bytes": 32_000_000,
}


async def last_of(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    outputs = [output async for output in engine.generate(prompt, params)]
    assert outputs[-1].finished
    return outputs[-1]


async def run_async(engine: AsyncEngine, delay_s: float) -> list[Signature]:
    """All requests, each started a moment after the one before."""
    tasks = []
    for prompt, params in requests(engine.spec.vocab_size):
        tasks.append(asyncio.create_task(last_of(engine, prompt, params)))
        await asyncio.sleep(delay_s)
    return [signature(await task) for task in tasks]


@pytest.mark.parametrize("name", [*NAMES, *QUANTIZED[1:4]])
@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_offline_equals_asynchronous(name: str, delay_s: float) -> None:
    async def scenario() -> list[Signature]:
        config = EngineConfig.from_kwargs(**model_options(name), **OPTIONS)
        async with AsyncEngine.from_config(config) as engine:
            return await run_async(engine, delay_s)

    served = asyncio.run(scenario())
    with LLM(**model_options(name), **OPTIONS) as llm:
        assert run_together(llm) == served


def test_a_client_that_leaves_changes_nothing_for_others() -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=24, logprobs=1)
    prompt = list(range(20, 60))

    async def scenario() -> tuple[Signature, int]:
        config = EngineConfig.from_kwargs(**OPTIONS)
        async with AsyncEngine.from_config(config) as engine:
            task = asyncio.create_task(last_of(engine, prompt, params))
            leaving = engine.generate(list(range(30, 90)), params.with_(max_tokens=400))
            await anext(leaving)
            await leaving.aclose()
            found = signature(await task)
            return found, engine.stats.num_running

    found, num_running = asyncio.run(scenario())
    assert num_running == 0
    with LLM(**OPTIONS) as llm:
        assert signature(llm.generate([prompt], params, use_tqdm=False)[0]) == found
