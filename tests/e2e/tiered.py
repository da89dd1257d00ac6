"""Engines with tiers below the device, small enough that pages leave it, and ways to make them."""

from collections.abc import Sequence
from typing import Any

from tests.e2e.models import model_options
from tests.e2e.workload import GREEDY, Signature, requests, signature

from moestro import LLM, RequestOutput, SamplingParams
from moestro.core.kv_hints import PrefixUse
from moestro.runner.transfer import PageTransfer

PAGE_SIZE = 16


def start(name: str, **options: Any) -> LLM:
    """Short pages, patience with the store, and no pace that tests would wait for."""
    options = {
        "max_model_len": 512,
        "page_size": PAGE_SIZE,
        "num_threads": 1,
        "kv_cache_memory_bytes": 32_000_000,
        "enforce_eager": True,
        "kv_store_timeout_s": 30.0,
        "kv_background_bytes_per_s": 0,
    } | options
    return LLM(**model_options(name), **options)


def transfer_of(llm: LLM) -> PageTransfer:
    """What moves an engine's pages."""
    tiers = llm._open().engine._runner._tiers  # type: ignore[attr-defined]
    assert tiers is not None
    transfer: PageTransfer = tiers.transfer
    return transfer


def settle(llm: LLM) -> None:
    """Until everything that was computed lies where it is to go."""
    engine = llm._open().engine
    while engine.tend():
        transfer_of(llm).wait(1.0)


def evict(llm: LLM) -> None:
    """Have other prompts take every page of the device."""
    num_tokens = llm.plan.max_model_len - 2
    for i in range(-(-llm.plan.max_context_tokens // num_tokens)):
        prompt = [7 + (i * 31 + j * j) % 250 for j in range(num_tokens)]
        llm.generate([prompt], GREEDY.with_(max_tokens=1, logprobs=None), use_tqdm=False)
    settle(llm)


def ask(llm: LLM, prompt: Sequence[int], params: SamplingParams = GREEDY) -> RequestOutput:
    return llm.generate([list(prompt)], params, use_tqdm=False)[0]


def prefix_of(output: RequestOutput) -> PrefixUse:
    assert output.timing is not None
    return output.timing.prefix


def run_all(llm: LLM, *, together: bool = False) -> tuple[list[Signature], list[PrefixUse]]:
    """The workload without its unseeded request: what came out, and from where it was read."""
    asked = [(p, s) for p, s in requests(llm.spec.vocab_size) if s.seed is not None]
    if together:
        outputs = llm.generate([p for p, _ in asked], [s for _, s in asked], use_tqdm=False)
    else:
        outputs = [ask(llm, p, s) for p, s in asked]
    return [signature(o) for o in outputs], [prefix_of(o) for o in outputs]
