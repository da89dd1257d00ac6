"""Running several prompts of one call."""

import asyncio
from contextlib import aclosing

from tests.server.client import make_context
from tests.server.fake_engine import FakeEngine

from moestro.core.sampling_params import SamplingParams
from moestro.server.generation import Job, run_jobs


def test_jobs_wait_until_their_output_has_been_dealt_with() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        jobs = [Job(prompt=p, params=SamplingParams(max_tokens=5)) for p in ("a", "bc", "d")]
        texts = {}
        async with aclosing(run_jobs(make_context(engine), jobs, "r")) as outputs:
            async for at, output in outputs:
                for _ in range(20):  # a client that is slow to read
                    await asyncio.sleep(0)
                seen = len(output.outputs[0].token_ids)
                assert engine.calls[at].num_yielded == seen
                texts[at] = output.outputs[0].text
        assert texts == {0: "bcdef", 1: "defgh", 2: "efghi"}

    asyncio.run(scenario())
