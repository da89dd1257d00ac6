"""MTP drafts through the engine: the same text, and drafts kept as an offline count says."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.e2e.tiered import PAGE_SIZE, ask, evict, prefix_of, settle, start
from tests.e2e.workload import NEEDS_KERNELS, signature
from tests.oracle.configs import hy_v3
from tests.oracle.heldout import heldout_windows
from tests.speculative.acceptance import accepted_counts, chain_matches, walked
from tests.speculative.drafting import drawn, loaded, text

from moestro import LLM, RequestOutput, SamplingParams
from moestro.core.model_config import load_model_spec, parse_model_config
from moestro.core.step import Schedule, StepOutput
from moestro.models.causal_lm import CausalLM
from moestro.weights.source import resolve_model

pytestmark = NEEDS_KERNELS

DEPTH = 3
LENGTH = 64
PROMPTS = [heldout_windows()[w][:n].tolist() for w, n in ((7, 83), (10, 96), (33, 81))]


def drafting(depth: int = DEPTH, method: str = "mtp") -> dict[str, Any]:
    config = {"method": method, "num_speculative_tokens": depth, "adaptive": False}
    return {"speculative_config": config}


def params_of(seed: int) -> SamplingParams:
    """Sampled text doesn't run in circles, as a small model's greedy text does."""
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=LENGTH, ignore_eos=True)


class Verified:
    """Listens to an engine's runner: drafts kept of those verified, step by step."""

    def __init__(self, llm: LLM) -> None:
        self._kept: list[int] = []
        runner: Any = llm._open().engine._runner  # type: ignore[attr-defined]
        execute = runner.execute

        def told(schedule: Schedule) -> StepOutput:
            output: StepOutput = execute(schedule)
            self._kept += [s.num_accepted_tokens for s in output.sequences if s.num_draft_tokens]
            return output

        runner.execute = told

    def take(self) -> list[int]:
        kept, self._kept = self._kept, []
        return kept


@functools.cache
def tiny() -> CausalLM:
    folder = resolve_model("tiny-hy3")
    return loaded(load_model_spec(folder), folder, torch.bfloat16)


@functools.cache
def said(index: int) -> tuple[int, ...]:
    """What the engine says behind PROMPTS[index] without drafts."""
    with start("tiny-hy3") as llm:
        return tuple(ask(llm, PROMPTS[index], params_of(index)).outputs[0].token_ids)


def expected_kept(index: int) -> list[int]:
    """Of a chain of DEPTH drafts at every step of the same text, but the last ones of it."""
    prompt = PROMPTS[index]
    whole = [*prompt, *said(index)]
    matches = chain_matches(tiny(), whole, DEPTH, len(prompt) - 1)
    return walked(accepted_counts(matches)).tolist()[:-1]


def check(llm: LLM, verified: Verified, index: int) -> RequestOutput:
    """Ask for the text, and compare it and what was kept with what they have to be."""
    verified.take()
    output = ask(llm, PROMPTS[index], params_of(index))
    kept, expected = verified.take(), expected_kept(index)
    assert tuple(output.outputs[0].token_ids) == said(index)
    assert len(expected) > 15
    assert kept[: len(expected)] == expected
    return output


@pytest.mark.parametrize("eager", [True, False])
def test_as_many_drafts_are_kept_as_the_text_keeps_offline(eager: bool) -> None:
    with start("tiny-hy3", enforce_eager=eager, **drafting()) as llm:
        verified = Verified(llm)
        for index in range(len(PROMPTS)):
            check(llm, verified, index)
    with start("tiny-hy3", max_num_batched_tokens=29, enforce_eager=eager, **drafting()) as llm:
        check(llm, Verified(llm), 0)


def test_as_many_after_a_hit_in_every_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages hold the KV of the MTP layer too, and bring it back."""
    monkeypatch.setattr("moestro.kvcache.fetcher.should_load", lambda *_: True)
    store = {
        "kv_store": f"lmdb://{tmp_path / 'kv'}",
        "kv_store_bytes": "1GiB",
        "cache_dir": str(tmp_path / "cache"),
    }
    with start("tiny-hy3", **drafting()) as llm:
        page_bytes = llm.plan.kv_cache_bytes // llm.plan.num_pages
    small = {"max_model_len": 256, "kv_cache_memory_bytes": 40 * page_bytes}
    hit = len(PROMPTS[0]) // PAGE_SIZE * PAGE_SIZE
    with start("tiny-hy3", **small, **store, host_kv_bytes="40MB", **drafting()) as llm:
        verified = Verified(llm)
        assert prefix_of(check(llm, verified, 0)).device_tokens == 0
        assert prefix_of(check(llm, verified, 0)).device_tokens == hit
        evict(llm)
        assert prefix_of(check(llm, verified, 0)).host_tokens == hit
        settle(llm)
    with start("tiny-hy3", **store, **drafting()) as llm:
        assert prefix_of(check(llm, Verified(llm), 0)).store_tokens == hit


def test_pages_of_engines_without_drafts_are_other_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold no KV of the MTP layer, so an engine that drafts computes its own."""
    monkeypatch.setattr("moestro.kvcache.fetcher.should_load", lambda *_: True)
    store = {"kv_store": f"lmdb://{tmp_path / 'kv'}", "cache_dir": str(tmp_path / "cache")}
    for options in ({}, drafting(), drafting(method="ngram")):
        with start("tiny-hy3", **store, **options) as llm:
            output = ask(llm, PROMPTS[0], params_of(0).with_(max_tokens=1))
            settle(llm)
            found = prefix_of(output).store_tokens
            assert (found > 0) == (options == drafting(method="ngram"))


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("num_mtp_layers", [1, 2])
def test_greedy_text_and_logprobs_are_the_same(
    num_mtp_layers: int, depth: int, tmp_path: Path
) -> None:
    config = hy_v3(num_nextn_predict_layers=num_mtp_layers, vocab_size=300)
    (tmp_path / "config.json").write_text(json.dumps(config))
    drawn(parse_model_config(config), 5, tmp_path)
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "page_size": PAGE_SIZE,
        "num_threads": 1,
        "kv_cache_memory_bytes": 8_000_000,
    }
    prompts = [text(n, n, 300) for n in (1, 16, 17, 40)]
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=3, ignore_eos=True)

    def run(**more: Any) -> list[Any]:
        with LLM(str(tmp_path), **options, **more) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [signature(output) for output in outputs]

    plain = run()
    assert run(**drafting(depth)) == plain
    assert run(max_num_batched_tokens=7, enforce_eager=True, **drafting(depth)) == plain


def test_the_count_is_of_enough_chains() -> None:
    """Shares of what is kept, pooled: the numbers docs/speculation.md is about."""
    kept = np.concatenate([expected_kept(i) for i in range(len(PROMPTS))])
    assert len(kept) > 80
    assert 0.3 < np.mean(kept > 0) < 0.95
