"""Hints, explanations, timing and KV events of a real model, from Python and over HTTP."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from moestro.config import EngineConfig
from moestro.core.kv_hints import HintAction, HintRefusal, KVHints, MissReason
from moestro.core.outputs import RequestOutput
from moestro.core.sampling_params import SamplingParams
from moestro.engine.async_engine import AsyncEngine
from moestro.errors import RequestError

PAGE = 16
OPTIONS: dict[str, Any] = {
    "model": "tiny-hy3",
    "page_size": PAGE,
    "kv_cache_memory_bytes": "16MiB",
    "num_threads": 1,
    "enforce_eager": True,
}
GREEDY = SamplingParams(max_tokens=4, temperature=0)
PROMPT = [7 + i % 500 for i in range(10 * PAGE + 3)]


async def ask(engine: AsyncEngine, prompt: list[int], **options: Any) -> RequestOutput:
    outputs = [o async for o in engine.generate(prompt, GREEDY, **options)]
    return outputs[-1]


def with_engine(scenario: Callable[[AsyncEngine], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with AsyncEngine.from_config(EngineConfig(**OPTIONS | options)) as engine:
            await scenario(engine)

    asyncio.run(run())


def test_a_session_is_named_pinned_and_dropped() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        hints = KVHints(session_id="agent", pin_ttl_s=60)
        first = await ask(engine, PROMPT, kv_hints=hints)
        assert first.kv_hints is not None
        assert (first.kv_hints.accepted, first.kv_hints.refused) == (10 * PAGE, None)
        assert first.kv_hints.accepted + first.kv_hints.clipped == len(PROMPT) + 4
        assert first.kv_hints.expires_at is not None
        again = await ask(engine, PROMPT)
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        assert again.timing is not None
        assert (again.timing.prefix.device_tokens, again.timing.prefix.miss) == (10 * PAGE, None)
        assert again.kv_hints is None
        renewed = await engine.hint(HintAction.PIN, session_id="agent", ttl_s=30)
        assert (renewed.accepted, renewed.expires_in_s) == (10 * PAGE, 30)
        dropped = await engine.hint(HintAction.DROP, session_id="agent")
        assert dropped.accepted + dropped.clipped == len(PROMPT) + 4
        gone = await engine.hint(HintAction.PIN, session_id="agent", ttl_s=30)
        assert gone.refused in (HintRefusal.UNKNOWN_SESSION, HintRefusal.NOT_CACHED)

    with_engine(scenario)


def test_sessions_of_other_tenants_are_unknown() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        await ask(engine, PROMPT, kv_hints=KVHints(session_id="agent"), cache_salt="mine")
        for salt in ("", "yours"):
            answer = await engine.hint(HintAction.DEMOTE, session_id="agent", cache_salt=salt)
            assert answer.refused is HintRefusal.UNKNOWN_SESSION
        mine = await engine.hint(HintAction.DEMOTE, session_id="agent", cache_salt="mine")
        assert mine.accepted

    with_engine(scenario)


def test_hints_that_can_not_be_leave_the_engine_serving() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        before = await ask(engine, PROMPT, kv_hints=KVHints(session_id="agent"), cache_salt="me")
        for wrong in (
            {"action": HintAction.PIN, "session_id": "agent", "ttl_s": 10**400},
            {"action": HintAction.PIN, "session_id": "agent", "ttl_s": float("nan")},
            {"action": "pin", "session_id": "agent"},
            {"action": HintAction.DROP, "session_id": "agent", "cache_salt": None},
            {"action": HintAction.DROP, "prompt": [-1]},
            {"action": HintAction.DROP, "prompt": [2**64]},
        ):
            with pytest.raises(RequestError):
                await engine.hint(**wrong)
        with pytest.raises(RequestError, match="cache_salt"):
            await engine.explain(PROMPT, cache_salt=b"me")  # type: ignore[arg-type]
        for action in HintAction:
            ttl = {"ttl_s": 5} if action is HintAction.PIN else {}
            stolen = await engine.hint(action, session_id="agent", cache_salt="\ud800", **ttl)
            assert stolen.refused is HintRefusal.UNKNOWN_SESSION
        after = await ask(engine, PROMPT, cache_salt="me")
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
        assert after.num_cached_tokens == 10 * PAGE

    with_engine(scenario)


def test_pins_are_bounded_by_quota_and_prefetch_needs_a_tier() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        long = [11 + i % 300 for i in range(engine.plan.num_pages * PAGE // 2)]
        await ask(engine, long, kv_hints=KVHints(session_id="big"))
        answer = await engine.hint(HintAction.PIN, session_id="big", ttl_s=60)
        assert 0 < answer.accepted < len(long) // PAGE * PAGE
        assert answer.clipped
        unknown = await engine.hint(HintAction.PREFETCH, [9] * (4 * PAGE), ttl_s=5)
        assert unknown.refused is HintRefusal.NO_TIER

    with_engine(scenario, kv_cache_memory_bytes="4MiB")


def test_a_prompt_is_explained_to_the_first_differing_token() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        num_tokens, found = await engine.explain(PROMPT)
        assert (num_tokens, found.num_cached_tokens) == (len(PROMPT), 0)
        assert found.miss is MissReason.NO_PREFIX
        await ask(engine, PROMPT)
        assert (await engine.explain(PROMPT))[1].miss is None
        other = [*PROMPT[: 5 * PAGE + 7], 3, *PROMPT[5 * PAGE + 8 :]]
        found = (await engine.explain(other))[1]
        assert (found.device_tokens, found.miss) == (5 * PAGE, MissReason.DIFFERS)
        assert found.first_difference == 5 * PAGE + 7
        output = await ask(engine, other)
        assert output.timing is not None
        assert output.timing.prefix.first_difference == 5 * PAGE + 7
        assert (await engine.explain(PROMPT, cache_salt="new"))[1].miss is not None

    with_engine(scenario)


def test_events_name_the_pages_of_a_prompt(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/replay"
    events_config = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/pub",
        "replay_endpoint": address,
    }

    async def scenario(engine: AsyncEngine) -> None:
        await ask(engine, PROMPT, cache_salt="tenant", kv_hints=KVHints(session_id="s"))

    with_engine_and_replay(scenario, events_config, address)


def with_engine_and_replay(
    scenario: Callable[[AsyncEngine], Awaitable[None]], events_config: dict[str, Any], address: str
) -> None:
    """Runs the scenario, and looks at all that was published."""

    async def run(engine: AsyncEngine) -> None:
        await scenario(engine)
        stored = await asyncio.to_thread(replayed, address, 10)
        tokens = [t for event in stored for t in event["token_ids"]]
        assert tokens[: 10 * PAGE] == PROMPT[: 10 * PAGE]
        assert {event["medium"] for event in stored} == {"GPU"}
        salts = [key for event in stored for key in event["extra_keys"]]
        assert salts == [["tenant"], *[None] * 9]  # the first page's, as vLLM has it
        assert {event["session_id"] for event in stored} == {"s"}
        parents = [None, *(event["block_hashes"][-1] for event in stored)]
        assert [event["parent_block_hash"] for event in stored] == parents[: len(stored)]
        assert all(len(event["token_ids"]) == PAGE * len(event["block_hashes"]) for event in stored)

    with_engine(run, kv_events_config=events_config)


def replayed(address: str, num_pages: int) -> list[dict[str, Any]]:
    """The stores that the replay socket tells, once there are so many pages."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.RCVTIMEO, 20_000)
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(address)
        for _ in range(100):
            asking.send_multipart([b"", bytes(8)])
            stored: list[dict[str, Any]] = []
            while (frames := asking.recv_multipart())[2]:
                batch = msgspec.msgpack.decode(frames[2])
                stored += [e for e in batch[1] if e["type"] == "BlockStored"]
            if sum(len(e["block_hashes"]) for e in stored) >= num_pages:
                return stored
    raise AssertionError(f"only {len(stored)} events")


@pytest.mark.parametrize("caching", [True, False])
def test_without_a_prefix_cache_hints_are_refused(caching: bool) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        output = await ask(engine, PROMPT, kv_hints=KVHints(session_id="s", pin_ttl_s=5))
        assert output.kv_hints is not None
        refused = None if caching else HintRefusal.CACHING_OFF
        assert output.kv_hints.refused is refused
        answer = await engine.hint(HintAction.DEMOTE, PROMPT)
        assert (answer.refused is HintRefusal.CACHING_OFF) is not caching

    with_engine(scenario, enable_prefix_caching=caching)
