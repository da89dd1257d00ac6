"""Hit = miss: pages from below the device give every token and logprob that computing gives."""

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.e2e.models import model_path
from tests.e2e.tiered import (
    PAGE_SIZE,
    ask,
    evict,
    prefix_of,
    run_all,
    settle,
    start,
    transfer_of,
)
from tests.e2e.workload import GREEDY, NEEDS_KERNELS, SAMPLED, Signature, signature
from tests.kvstore.redis_server import RedisServer

from moestro import LLM
from moestro.core.page_moves import MoveFailure
from moestro.core.page_store import StoreError
from moestro.kvstore.data_file import DataFile
from moestro.kvstore.lmdb_store import LmdbStore
from moestro.weights.source import resolve_model

pytestmark = NEEDS_KERNELS

ROOT = Path(__file__).parents[2]
KINDS = [
    ("tiny-hy3", "auto"),
    ("hy_v3", "int8"),
    ("hy_v3", "auto"),
    ("qwen3_moe", "fp8"),
    ("qwen3_moe", "auto"),
]
EVERY_KIND = pytest.mark.parametrize(("name", "kv"), KINDS, ids=[f"{n}-{kv}" for n, kv in KINDS])
HOST = {"host_kv_bytes": 40_000_000}
PROMPT = [3 + 11 * i % 257 for i in range(6 * PAGE_SIZE + 5)]


@pytest.fixture(autouse=True)
def always_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a page of these models takes longer than computing it."""
    monkeypatch.setattr("moestro.kvcache.fetcher.should_load", lambda *_: True)


@pytest.fixture
def store(tmp_path: Path) -> dict[str, Any]:
    """Options of an engine with a store of its own."""
    url = f"lmdb://{tmp_path / 'kv'}"
    return {"kv_store": url, "kv_store_bytes": "1GiB", "cache_dir": str(tmp_path / "cache")}


@functools.cache
def computed(name: str, kv: str) -> list[Signature]:
    """The standard: one by one, nothing cached."""
    with start(name, kv_cache_dtype=kv, enable_prefix_caching=False) as llm:
        return run_all(llm)[0]


@functools.cache
def alone(prompt: tuple[int, ...], name: str = "tiny-hy3") -> Signature:
    with start(name, enable_prefix_caching=False) as llm:
        return signature(ask(llm, prompt))


@EVERY_KIND
def test_a_hit_in_the_host_tier_gives_what_a_miss_gives(name: str, kv: str) -> None:
    with start(name, kv_cache_dtype=kv) as llm:
        page_bytes = llm.plan.kv_cache_bytes // llm.plan.num_pages
    small = {"max_model_len": 256, "kv_cache_memory_bytes": 40 * page_bytes, **HOST}
    with start(name, kv_cache_dtype=kv, enforce_eager=False, **small) as llm:
        assert run_all(llm)[0] == computed(name, kv)
        for together in (False, True):  # demoted and promoted twice
            evict(llm)
            again, prefixes = run_all(llm, together=together)
            assert again == computed(name, kv)
            assert sum(p.host_tokens for p in prefixes) >= 4 * PAGE_SIZE
        assert transfer_of(llm).state().failures == ()


@EVERY_KIND
def test_a_hit_in_the_store_gives_what_a_miss_gives(
    name: str, kv: str, store: dict[str, Any]
) -> None:
    with start(name, kv_cache_dtype=kv, **store) as llm:
        run_all(llm)
    for options in (HOST, {"max_num_batched_tokens": 37, "enforce_eager": False}):
        with start(name, kv_cache_dtype=kv, **store, **options) as llm:
            again, prefixes = run_all(llm, together=options is HOST)
            assert again == computed(name, kv)
            assert sum(p.store_tokens for p in prefixes) >= 4 * PAGE_SIZE
            assert transfer_of(llm).state().failures == ()


def test_hits_end_at_any_page(store: dict[str, Any]) -> None:
    with start("tiny-hy3", **store) as llm:
        ask(llm, PROMPT)
    for num_pages in range(1, 7):
        end = num_pages * PAGE_SIZE
        prompts = [*PROMPT[:end], 90 + num_pages, 5, 6], PROMPT[: end + 1], PROMPT[:end]
        prompt = prompts[num_pages % 3]
        with start("tiny-hy3", **store, **HOST) as llm:
            output = ask(llm, prompt)
            assert signature(output) == alone(tuple(prompt)), (num_pages, len(prompt))
            expected = min(end, len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE
            assert prefix_of(output).store_tokens == expected == output.num_cached_tokens
    with start("tiny-hy3", **HOST, max_model_len=128, kv_cache_memory_bytes=12 * 40960) as llm:
        ask(llm, PROMPT)
        for num_pages in range(1, 7):
            evict(llm)
            prompt = [*PROMPT[: num_pages * PAGE_SIZE], 90 + num_pages, 5, 6]
            output = ask(llm, prompt)
            assert signature(output) == alone(tuple(prompt)), num_pages
            assert prefix_of(output).host_tokens == num_pages * PAGE_SIZE


LONG = [[PROMPT[(7 * i + j) % len(PROMPT)] for j in range(70)] for i in range(4)]


@functools.cache
def long_ones() -> list[Signature]:
    """Four sequences that grow to 150 tokens, one by one."""
    with start("tiny-hy3", enable_prefix_caching=False) as llm:
        return [signature(ask(llm, p, GREEDY.with_(max_tokens=80))) for p in LONG]


@pytest.mark.parametrize("policy", ["write_through", "write_back", "write_through_selective"])
def test_preempted_sequences_and_every_policy(policy: str, store: dict[str, Any]) -> None:
    small = {"max_model_len": 224, "kv_cache_memory_bytes": 14 * 40960, "kv_write_policy": policy}
    with start("tiny-hy3", **store, **HOST, **small, kv_selective_hits=1) as llm:
        for _ in range(2):
            outputs = llm.generate(LONG, GREEDY.with_(max_tokens=80), use_tqdm=False)
            assert [signature(o) for o in outputs] == long_ones()
        assert llm.stats().num_preemptions > 0
        assert run_all(llm, together=True)[0] == computed("tiny-hy3", "auto")
        settle(llm)
        evict(llm)
        again, prefixes = run_all(llm)
        assert again == computed("tiny-hy3", "auto")
        # write_back keeps what it can save before the device needs the page
        assert policy == "write_back" or sum(p.host_tokens for p in prefixes) > 0
        assert transfer_of(llm).state().failures == ()


def test_aborted_requests_leave_no_trace(store: dict[str, Any]) -> None:
    with start("tiny-hy3", **store) as llm:
        run_all(llm)
    small = {"max_model_len": 256, "kv_cache_memory_bytes": 20 * 40960}
    with start("tiny-hy3", **store, **HOST, **small) as llm:
        built = llm._open()
        for steps in range(6):
            for i in range(4):
                ids = [*PROMPT[: 30 + 20 * i], 7 + i]
                request = built.processor.process(
                    ids, SAMPLED, request_id=f"gone-{steps}-{i}", submission=99
                )
                built.engine.add_request(request)
            for _ in range(steps):
                built.engine.step()
            built.engine.abort_all()
            built.engine.discard_pending()
        assert run_all(llm, together=True)[0] == computed("tiny-hy3", "auto")


def test_two_engines_use_each_others_pages(store: dict[str, Any]) -> None:
    with start("tiny-hy3", **store) as one, start("tiny-hy3", **store, **HOST) as two:
        for i in range(3):
            prompt = [*PROMPT[i:], i]
            first, second = (one, two) if i % 2 else (two, one)
            assert signature(ask(first, prompt)) == alone(tuple(prompt))
            settle(first)
            output = ask(second, prompt)
            assert signature(output) == alone(tuple(prompt))
            assert prefix_of(output).store_tokens >= 5 * PAGE_SIZE


_CHILD = """
import json, sys
from tests.e2e.tiered import run_all, start
with start("hy_v3", **json.loads(sys.argv[1])) as llm:
    signatures, prefixes = run_all(llm)
    json.dump([signatures, sum(p.store_tokens for p in prefixes)], sys.stdout)
"""


def in_another_process(options: dict[str, Any]) -> tuple[Any, int]:
    """The workload's signatures there, and how many tokens it had from the store."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(options)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    signatures, store_tokens = json.loads(done.stdout)
    return signatures, store_tokens


def test_another_process_uses_the_pages(store: dict[str, Any]) -> None:
    wanted = json.loads(json.dumps(computed("hy_v3", "auto")))
    with start("hy_v3", **store) as llm:
        run_all(llm)
    # the model there is written anew: the same bytes elsewhere have the same names
    signatures, store_tokens = in_another_process(store)
    assert signatures == wanted
    assert store_tokens >= 4 * PAGE_SIZE


def test_pages_go_through_redis_and_its_end_costs_time_only(store: dict[str, Any]) -> None:
    server = RedisServer()
    try:
        options = store | {"kv_store": server.url, "kv_store_timeout_s": 1.0}
        with start("tiny-hy3", **options) as llm:
            run_all(llm)
        with start("tiny-hy3", **options, **HOST) as llm:
            again, prefixes = run_all(llm)
            assert again == computed("tiny-hy3", "auto")
            assert sum(p.store_tokens for p in prefixes) >= 4 * PAGE_SIZE
            server.kill()
            for _ in range(2):
                prompt = [*PROMPT, 8, 9]
                assert signature(ask(llm, prompt)) == alone(tuple(prompt))
            settle(llm)
            assert transfer_of(llm).state().failures != ()
        with start("tiny-hy3", **options) as llm:  # a dead server at the start
            assert signature(ask(llm, PROMPT)) == alone(tuple(PROMPT))
            settle(llm)
            assert transfer_of(llm).state().failures != ()
    finally:
        server.kill()


def changed_weights(folder: Path) -> None:
    """Another model of equal shapes under the same path."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if "k_proj" in name:
                tensors[name] = tensors[name] * 1.5
        save_file(tensors, file)


def test_other_weights_under_the_same_path_hit_nothing(
    tmp_path: Path, store: dict[str, Any]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve_model(model_path("tiny-hy3")), folder)
    options = store | {"model": str(folder)}

    def run() -> tuple[Signature, int]:
        with LLM(max_model_len=256, page_size=PAGE_SIZE, num_threads=1, **options) as llm:
            assert transfer_of(llm).has_store
            output = ask(llm, PROMPT)
            return signature(output), output.num_cached_tokens

    first, cached = run()
    assert cached == 0
    assert run() == (first, 6 * PAGE_SIZE)
    changed_weights(folder)
    second, cached = run()
    assert cached == 0
    assert second != first
    assert run() == (second, 6 * PAGE_SIZE)


@pytest.mark.parametrize(
    "change",
    [
        {"page_size": 32},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8"},
        {"dtype": "float32"},
        {"quantization": "w8a8"},
    ],
    ids=str,
)
def test_another_kind_of_page_hits_nothing(change: dict[str, Any], store: dict[str, Any]) -> None:
    name = "tiny-hy3:w8a8" if "quantization" in change else "tiny-hy3"
    change = {k: v for k, v in change.items() if k != "quantization"}
    with start("tiny-hy3", **store) as llm:
        ask(llm, PROMPT)
    with start(name, **store | change) as llm:
        assert transfer_of(llm).has_store
        assert ask(llm, PROMPT).num_cached_tokens == 0
    with start("tiny-hy3", **store) as llm:
        assert ask(llm, PROMPT).num_cached_tokens == 6 * PAGE_SIZE


@pytest.mark.parametrize("failure", [MoveFailure.UNAVAILABLE, MoveFailure.TIMEOUT])
@pytest.mark.parametrize("call", ["get_many", "exists_many", "put_many"])
def test_a_store_that_dies_costs_time_only(
    call: str, failure: MoveFailure, store: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with start("tiny-hy3", **store) as llm:
        ask(llm, PROMPT)

    def die(*_: object) -> None:
        raise StoreError(failure, "as the test wished")

    with start("tiny-hy3", **store, **HOST) as llm:
        monkeypatch.setattr(LmdbStore, call, die)
        output = ask(llm, [*PROMPT, 1, 2])
        assert signature(output) == alone((*PROMPT, 1, 2))
        settle(llm)
        assert run_all(llm, together=True)[0] == computed("tiny-hy3", "auto")
        settle(llm)
        assert str(failure) in dict(transfer_of(llm).state().failures)


def test_flipped_bits_are_recomputed_and_counted(
    store: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with start("tiny-hy3", **store) as llm:
        ask(llm, PROMPT)
    read = DataFile.read

    def damaged(self: DataFile, place: int, out: memoryview) -> bool:
        found = read(self, place, out)
        out[len(out) // 2] ^= 4
        return found

    with start("tiny-hy3", **store, **HOST) as llm:
        monkeypatch.setattr(DataFile, "read", damaged)
        output = ask(llm, PROMPT)
        assert signature(output) == alone(tuple(PROMPT))
        assert output.num_cached_tokens == 0
        state = transfer_of(llm).state()
        assert dict(state.failures).get("corrupt", 0) >= 1
    monkeypatch.undo()


def test_a_lossy_host_tier_is_said_to_be_one(caplog: pytest.LogCaptureFixture) -> None:
    small = {"max_model_len": 256, "kv_cache_memory_bytes": 40 * 40960}
    with start("tiny-hy3", **HOST, **small, host_kv_dtype="int8") as llm:
        assert any("hit != miss" in note for note in llm.plan.notes)
        first = ask(llm, PROMPT)
        evict(llm)
        again = ask(llm, PROMPT)
        assert prefix_of(again).host_tokens == 6 * PAGE_SIZE
        assert again.outputs[0].token_ids[0] == first.outputs[0].token_ids[0]
        assert signature(again) != signature(first)  # rounded: the logprobs show it
