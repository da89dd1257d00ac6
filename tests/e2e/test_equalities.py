"""Same tokens, always: nothing about how a request is run changes a bit of what it gives."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.models import NAMES, QUANTIZED, model_options
from tests.e2e.workload import (
    GREEDY,
    NEEDS_KERNELS,
    SAMPLED,
    Signature,
    requests,
    run_one_by_one,
    run_together,
    signature,
)

from moestro import LLM
from moestro.backends.cpu.library import native, status

pytestmark = NEEDS_KERNELS

ROOT = Path(__file__).parents[2]
MODELS = pytest.mark.parametrize("name", NAMES)
FORMATS = pytest.mark.parametrize("name", [*NAMES, *QUANTIZED])


def start(name: str, **options: Any) -> LLM:
    """A small engine: short pages, so that the workload fills several."""
    options = {
        "max_model_len": 512,
        "page_size": 16,
        "num_threads": 1,
        "kv_cache_memory_bytes": 32_000_000,
    } | options
    return LLM(**model_options(name), **options)


@functools.cache
def undisturbed(name: str, dtype: str = "auto") -> tuple[Signature, ...]:
    """The standard all others are held to: each request alone, prompt in one piece, no cache."""
    with start(name, dtype=dtype, enable_prefix_caching=False) as llm:
        return tuple(run_one_by_one(llm))


@MODELS
def test_the_workload_is_worth_comparing(name: str) -> None:
    """Several tokens, not all alike, samples that differ."""
    results = undisturbed(name)
    tokens = [c[1] for result in results for c in result[2]]
    assert sum(map(len, tokens)) > 100
    assert len({t for ids in tokens for t in ids}) > 30
    samples = {c[1] for c in results[5][2]}
    assert len(samples) == 3


@FORMATS
def test_a_batch_gives_what_singles_give(name: str) -> None:
    with start(name, enable_prefix_caching=False) as llm:
        assert run_together(llm) == list(undisturbed(name))


@FORMATS
@pytest.mark.parametrize("max_num_batched_tokens", [3, 16, 33, 100])
def test_chunks_give_what_a_whole_prefill_gives(name: str, max_num_batched_tokens: int) -> None:
    with start(name, max_num_batched_tokens=max_num_batched_tokens) as llm:
        assert run_together(llm) == list(undisturbed(name))


@FORMATS
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_eager_steps_give_what_captured_ones_give(name: str, dtype: str) -> None:
    with start(name, dtype=dtype, enforce_eager=True) as llm:
        assert run_together(llm) == list(undisturbed(name, dtype))


@FORMATS
def test_a_prefix_hit_gives_what_a_cold_start_gives(name: str) -> None:
    with start(name) as llm:
        asked = requests(llm.spec.vocab_size)
        assert run_one_by_one(llm) == list(undisturbed(name))
        before = llm.stats().prefix_hits_tokens
        again = llm.generate(
            [list(prompt) for prompt, _ in asked], [p for _, p in asked], use_tqdm=False
        )
        assert llm.stats().prefix_hits_tokens > before
        assert max(o.num_cached_tokens for o in again) >= 64
    # the last one draws its seed from its number, which is another one the second time
    assert [signature(o) for o in again][:-1] == list(undisturbed(name))[:-1]


@FORMATS
def test_preempted_gives_what_undisturbed_gives(name: str) -> None:
    with start(name) as llm:
        page_bytes = llm.plan.kv_cache_bytes // llm.plan.num_pages
    with start(name, max_model_len=256, kv_cache_memory_bytes=17 * page_bytes) as llm:
        results = run_together(llm)
        assert llm.stats().num_preemptions > 0
    assert results == list(undisturbed(name))


@FORMATS
def test_two_threads_give_what_one_gives(name: str) -> None:
    with start(name, num_threads=2) as llm:
        assert run_together(llm) == list(undisturbed(name))


@pytest.mark.parametrize("name", NAMES[1:])
def test_the_equalities_hold_in_fp32(name: str) -> None:
    with start(name, dtype="float32", max_num_batched_tokens=37) as llm:
        assert run_together(llm) == list(undisturbed(name, "float32"))


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "kv_hadamard"),
    [
        ("auto", "int8", False),
        ("auto", "int8", True),
        ("auto", "fp8", False),
        ("float32", "fp8", True),
        ("float32", "bfloat16", False),
    ],
)
def test_the_equalities_hold_for_quantised_kv(
    name: str, dtype: str, kv_cache_dtype: str, kv_hadamard: bool
) -> None:
    options = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "kv_hadamard": kv_hadamard}
    with start(name, **options, enable_prefix_caching=False, enforce_eager=True) as llm:
        alone = run_one_by_one(llm)
    with start(name, **options, max_num_batched_tokens=37, num_threads=2) as llm:
        assert run_together(llm) == alone
        page_bytes = llm.plan.kv_cache_bytes // llm.plan.num_pages
        assert run_one_by_one(llm)[:-1] == alone[:-1]  # from the prefix cache; own seeds differ
    with start(name, **options, max_model_len=256, kv_cache_memory_bytes=17 * page_bytes) as llm:
        assert run_together(llm) == alone
        assert llm.stats().num_preemptions > 0


@pytest.mark.parametrize("level", status().available_isas)
@pytest.mark.parametrize("name", ["hy_v3", *QUANTIZED[1:4]])
def test_every_kernel_level_keeps_the_promise(name: str, level: str) -> None:
    with native().at_level(level):
        with start(name, enable_prefix_caching=False) as llm:
            alone = run_one_by_one(llm)
        with start(name, max_num_batched_tokens=37, num_threads=2) as llm:
            assert run_together(llm) == alone


@MODELS
def test_aborted_neighbours_leave_no_trace(name: str) -> None:
    with start(name) as llm:
        built = llm._open()
        processor, engine = built.processor, built.engine
        for i in range(4):
            ids = [7 + i, *range(20, 50 + 9 * i)]
            request = processor.process(ids, SAMPLED, request_id=f"gone-{i}", submission=99)
            engine.add_request(request)
        for _ in range(3):
            engine.step()
        for i in range(4):
            engine.abort(f"gone-{i}")
        engine.discard_pending()
        assert run_together(llm) == list(undisturbed(name))


@MODELS
def test_more_samples_do_not_change_the_first(name: str) -> None:
    with start(name) as llm:
        prompt = [[100 + i for i in range(33)]]
        three = llm.generate(prompt, SAMPLED.with_(n=3), use_tqdm=False)[0]
        two = llm.generate(prompt, SAMPLED.with_(n=2), use_tqdm=False)[0]
        one = llm.generate(prompt, SAMPLED, use_tqdm=False)[0]
    assert three.outputs[:2] == two.outputs
    assert three.outputs[:1] == one.outputs


def test_prompt_logprobs_read_nothing_from_the_cache() -> None:
    with start("tiny-hy3") as llm:
        prompt = [[3 + 11 * i % 257 for i in range(200)]]
        params = GREEDY.with_(prompt_logprobs=2)
        first, second = (llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))
    assert second.num_cached_tokens == 0
    assert signature(first) == signature(second)
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    heads = [next(iter(e)) for e in first.prompt_logprobs[1:] if e is not None]
    assert heads == prompt[0][1:]


_CHILD = """
import json, sys
from tests.e2e.test_equalities import start
from tests.e2e.workload import run_together
with start("tiny-hy3", num_threads=2) as llm:
    json.dump(run_together(llm), sys.stdout)
"""


def test_another_process_gives_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == json.loads(json.dumps(undisturbed("tiny-hy3")))
