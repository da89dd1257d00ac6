"""A model in this process for the terminal: loads with a progress bar, streams, can be stopped."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from moestro.cli.loading_bar import loading_bar
from moestro.config import EngineConfig
from moestro.core.outputs import RequestOutput
from moestro.core.sampling_params import SamplingParams
from moestro.engine.async_engine import AsyncEngine
from moestro.engine.input_processor import Prompt

OnOutput = Callable[[RequestOutput], None]


class LocalEngine:
    """An AsyncEngine and the event loop it is used from. Ctrl-C ends the answer, not the engine."""

    def __init__(self, config: EngineConfig) -> None:
        with loading_bar() as (progress, captured):
            self.engine = AsyncEngine.from_config(
                config, progress=progress, graph_progress=captured
            )
        self._runner = asyncio.Runner()

    def stream(
        self, prompt: Prompt, params: SamplingParams, on_output: OnOutput, **options: Any
    ) -> RequestOutput | None:
        """Run one request, telling each output; the last one. KeyboardInterrupt aborts it."""

        async def run() -> RequestOutput | None:
            last = None
            async with aclosing(self.engine.generate(prompt, params, **options)) as outputs:
                async for last in outputs:
                    on_output(last)
            return last

        return self._runner.run(run())

    def __enter__(self) -> "LocalEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self.engine.close(drain=False))
        self._runner.close()
