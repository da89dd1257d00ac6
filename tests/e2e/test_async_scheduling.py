"""Planning ahead changes nothing that is said: the tokens and logprobs of one step at a time."""

import threading

import pytest

from moestro import LLM, SamplingParams

PROMPTS = ["The lighthouse", "Once upon a time, a fox", "1, 2, 3,", "def main(", "a " * 90]
OPTIONS = {"model": "tiny-hy3", "max_num_seqs": 3, "max_num_batched_tokens": 24}


def said(params: SamplingParams, **options: object) -> list[object]:
    with LLM(**OPTIONS, num_threads=1, **options) as llm:
        outputs = [*llm.generate(PROMPTS, params), *llm.generate(PROMPTS[::-1], params)]
        return [
            (each.token_ids, each.text, each.finish_reason, each.logprobs)
            for output in outputs
            for each in output.outputs
        ]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=24, logprobs=2),
        SamplingParams(temperature=0.9, top_p=0.9, seed=7, n=2, max_tokens=17, stop=["e"]),
        SamplingParams(temperature=0.7, repetition_penalty=1.2, max_tokens=9, min_tokens=5),
    ],
    ids=["greedy", "stop-strings", "penalties"],
)
def test_the_same_bits(params: SamplingParams) -> None:
    assert said(params, async_scheduling=True) == said(params, async_scheduling=False)
    assert not any(thread.name == "moestro-steps" for thread in threading.enumerate())


def test_preempted_by_a_small_kv_memory() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    small = {"max_model_len": 256, "page_size": 16, "kv_cache_memory_bytes": 1 << 20}
    assert said(params, async_scheduling=True, **small) == said(params, async_scheduling=False)
