"""An HTTP client of an application in this process."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from tests.server.fake_engine import FakeEngine

from moestro.chat.templates import ChatTemplate
from moestro.core.sampling_params import SamplingParams
from moestro.metrics import ServerMetrics
from moestro.server.app import create_app
from moestro.server.engine_client import ServedModel, ServerContext

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
USER = {"role": "user", "content": "hi"}


def make_context(engine: FakeEngine, **model: Any) -> ServerContext:
    """A context around `engine`; keywords replace fields of ServedModel."""
    fields: dict[str, Any] = {
        "names": ("tiny", "alias"),
        "root": "some/tiny",
        "max_model_len": engine.context,
        "created": 1_700_000_000,
        "chat_template": ChatTemplate(TEMPLATE),
        "tokenizer": engine.tokenizer,
        "default_params": SamplingParams(),
        **model,
    }
    return ServerContext(
        engine=engine,
        model=ServedModel(**fields),
        metrics=ServerMetrics("tiny", engine.context, {"block_size": 64}),
        version="9.9",
        max_body_bytes=100_000,
    )


@asynccontextmanager
async def client_of(context: ServerContext) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a fresh application around `context`."""
    transport = httpx.ASGITransport(create_app(context), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def events_of(text: str) -> list[Any]:
    """The payloads of an event stream; [DONE] stays text."""
    assert text.endswith("\n\n")
    lines = [part.removeprefix("data: ") for part in text[:-2].split("\n\n")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def metric(context: ServerContext, sample: str) -> float:
    """The value of one sample line, given as name{labels}."""
    for line in context.metrics.render().decode().splitlines():
        name, _, value = line.rpartition(" ")
        if name == sample:
            return float(value)
    raise AssertionError(f"no sample {sample}")


def call(context: ServerContext, method: str, path: str, **request: Any) -> httpx.Response:
    """One request, from code that is not asynchronous."""

    async def run() -> httpx.Response:
        async with client_of(context) as client:
            return await client.request(method, path, **request)

    return asyncio.run(run())


def post(context: ServerContext, path: str, body: object) -> httpx.Response:
    """POST a JSON body."""
    return call(context, "POST", path, json=body)
