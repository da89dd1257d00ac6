"""What the HTTP server answers is what LLM gives: text, every logprob, streamed or whole."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from tests.e2e.models import NAMES, model_path
from tests.e2e.workload import NEEDS_KERNELS

from moestro import LLM, EngineConfig, RequestOutput
from moestro.config import ServerConfig
from moestro.server.app import create_app
from moestro.server.serve import Server

pytestmark = NEEDS_KERNELS

OPTIONS: dict[str, Any] = {
    "max_model_len": 512,
    "page_size": 16,
    "num_threads": 1,
    "kv_cache_memory_bytes": 32_000_000,
}
PROMPTS = [[5 + 7 * i % 211 for i in range(n)] for n in (1, 40, 150)]
BODIES: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 16, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.9, "seed": 11, "max_tokens": 12, "logprobs": 0, "n": 2},
    {"temperature": 0.7, "frequency_penalty": 0.5, "max_tokens": 12, "logprobs": 1},
]
CALLS = [(prompt, body) for prompt in PROMPTS for body in BODIES]

Told = list[tuple[str, list[str], list[float], str | None]]


async def ask(client: httpx.AsyncClient, prompt: list[int], body: dict[str, Any]) -> Told:
    """One completion; per choice: text, tokens, their logprobs, why it ended."""
    answer = await client.post("/v1/completions", json={"prompt": prompt, **body})
    assert answer.status_code == 200, answer.text
    choices = sorted(answer.json()["choices"], key=lambda c: int(c["index"]))
    return [
        (c["text"], c["logprobs"]["tokens"], c["logprobs"]["token_logprobs"], c["finish_reason"])
        for c in choices
    ]


async def ask_streaming(client: httpx.AsyncClient, prompt: list[int], body: dict[str, Any]) -> Told:
    """The same from a stream."""
    told: dict[int, tuple[str, list[str], list[float], str | None]] = {}
    call = {"prompt": prompt, "stream": True, **body}
    async with client.stream("POST", "/v1/completions", json=call) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        for c in json.loads(line)["choices"]:
            text, tokens, logprobs, _ = told.get(c["index"], ("", [], [], None))
            scored = c["logprobs"] or {"tokens": [], "token_logprobs": []}
            told[c["index"]] = (
                text + c["text"],
                tokens + scored["tokens"],
                logprobs + scored["token_logprobs"],
                c["finish_reason"],
            )
    return [told[i] for i in sorted(told)]


def offline(name: str) -> list[RequestOutput]:
    """The same requests through LLM, in the same order."""
    with LLM(model_path(name), **OPTIONS) as llm:
        defaults = llm.get_default_sampling_params()
        params = [defaults.with_(**body) for _, body in CALLS]
        return llm.generate([list(p) for p, _ in CALLS], params, use_tqdm=False)


def as_told(output: RequestOutput, tokens: Told) -> Told:
    """What the API says of an offline output; token spellings are taken from `tokens`."""
    told: Told = []
    for completion, (_, spelt, _, _) in zip(output.outputs, tokens, strict=True):
        assert completion.logprobs is not None
        scored = [
            entry[token_id].logprob
            for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        reason = None if completion.finish_reason is None else str(completion.finish_reason)
        told.append((completion.text, spelt, scored, reason))
    return told


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stream", [False, True])
def test_served_equals_offline(name: str, stream: bool) -> None:
    async def scenario() -> list[Told]:
        config = EngineConfig.from_kwargs(model=model_path(name), **OPTIONS)
        server = Server.start(config, ServerConfig(), "test")
        transport = httpx.ASGITransport(create_app(server.context))
        call = ask_streaming if stream else ask
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            tasks = []
            for prompt, body in CALLS:  # in order: unseeded requests count submissions
                tasks.append(asyncio.create_task(call(client, prompt, body)))
                await asyncio.sleep(0.05)
            found = [await task for task in tasks]
        await server.engine.close()
        return found

    served = asyncio.run(scenario())
    expected = [as_told(o, told) for o, told in zip(offline(name), served, strict=True)]
    assert served == expected


def test_chat_over_http_is_chat_offline() -> None:
    messages = [{"role": "user", "content": "sort a list"}]
    body = {"messages": messages, "temperature": 0.8, "seed": 4, "max_tokens": 12}

    async def scenario() -> str:
        server = Server.start(EngineConfig.from_kwargs(**OPTIONS), ServerConfig(), "test")
        transport = httpx.ASGITransport(create_app(server.context))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.post("/v1/chat/completions", json=body)
        await server.engine.close()
        return str(answer.json()["choices"][0]["message"]["content"])

    with LLM(**OPTIONS) as llm:
        params = llm.get_default_sampling_params().with_(temperature=0.8, seed=4, max_tokens=12)
        offline_text = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
    assert asyncio.run(scenario()) == offline_text
