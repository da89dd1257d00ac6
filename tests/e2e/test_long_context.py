"""The equalities over a context of several attention super-tiles and of many pages."""

import functools

import pytest
from tests.e2e.workload import NEEDS_KERNELS, Signature, signature

from moestro import LLM, SamplingParams

pytestmark = NEEDS_KERNELS

PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=8, logprobs=5)
PROMPT = [3 + (17 * i + i * i // 5) % 3000 for i in range(1500)]


def start(**options: object) -> LLM:
    options = {"max_model_len": 2048, "num_threads": 1} | options
    return LLM("tiny-hy3", kv_cache_memory_bytes=40_000_000, **options)


@functools.cache
def whole() -> Signature:
    with start(enable_prefix_caching=False) as llm:
        return signature(llm.generate([PROMPT], PARAMS, use_tqdm=False)[0])


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "num_threads"), [(100, 1), (512, 2), (1499, 1), (2048, 2)]
)
def test_chunks_and_threads(max_num_batched_tokens: int, num_threads: int) -> None:
    with start(max_num_batched_tokens=max_num_batched_tokens, num_threads=num_threads) as llm:
        assert signature(llm.generate([PROMPT], PARAMS, use_tqdm=False)[0]) == whole()


@pytest.mark.parametrize("shared", [64, 1024, 1472])
def test_prefix_hits_inside_and_across_tiles(shared: int) -> None:
    with start() as llm:
        llm.generate([PROMPT[: shared + 1]], PARAMS, use_tqdm=False)
        output = llm.generate([PROMPT], PARAMS, use_tqdm=False)[0]
        assert output.num_cached_tokens == shared
        assert signature(output) == whole()


def test_beside_other_requests() -> None:
    with start(max_num_batched_tokens=256) as llm:
        others = [PROMPT[i : 40 * i + 50] for i in range(1, 6)]
        outputs = llm.generate([*others, PROMPT], PARAMS, use_tqdm=False)
    assert signature(outputs[-1]) == whole()
