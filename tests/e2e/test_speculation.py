"""Speculation never changes what is said: the workload with drafts equals that without."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.e2e.drafted import OPTIONS, drafting, injected, texts_of
from tests.e2e.models import NAMES, model_options
from tests.e2e.test_equalities import start, undisturbed
from tests.e2e.workload import (
    GREEDY,
    NEEDS_KERNELS,
    SAMPLED,
    requests,
    run_one_by_one,
    run_together,
    signature,
)
from tests.fakes.scripted_matcher import compile_script

from moestro import LLM, EngineConfig, SamplingParams
from moestro.core.grammar import GrammarSpec
from moestro.engine.build import build_engine
from moestro.engine.engine import Engine

pytestmark = NEEDS_KERNELS

MODELS = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize(
    ("name", "num_drafts"),
    [*(("tiny-hy3", k) for k in (1, 2, 3, 5, 8)), *(("hy_v3", k) for k in (1, 3, 8)),
     *(("qwen3_moe", k) for k in (2, 5))],
)  # fmt: skip
def test_injected_drafts_change_nothing(name: str, num_drafts: int) -> None:
    expected = list(undisturbed(name))
    drafter = injected(texts_of(expected), 0.8, seed=num_drafts)
    with drafting(name, num_drafts, drafter) as llm:
        assert run_together(llm) == expected
    assert drafter.num_drafted > 50


@pytest.mark.parametrize(("name", "num_drafts"), [("tiny-hy3", 1), ("hy_v3", 3), ("qwen3_moe", 8)])
def test_prompt_lookup_changes_nothing(name: str, num_drafts: int) -> None:
    with drafting(name, num_drafts) as llm:
        assert run_together(llm) == list(undisturbed(name))


@pytest.mark.parametrize(
    ("name", "max_num_batched_tokens"), [("tiny-hy3", 3), ("hy_v3", 16), ("qwen3_moe", 37)]
)
def test_small_budgets_change_nothing(name: str, max_num_batched_tokens: int) -> None:
    expected = list(undisturbed(name))
    drafter = injected(texts_of(expected), 0.7)
    options = {"max_num_batched_tokens": max_num_batched_tokens, "enable_prefix_caching": False}
    with drafting(name, 3, drafter, **options) as llm:
        assert run_together(llm) == expected


@MODELS
def test_preempted_sequences_with_drafts_go_on_the_same(name: str) -> None:
    expected = list(undisturbed(name))
    with start(name) as llm:
        page_bytes = llm.plan.kv_cache_bytes // llm.plan.num_pages
    drafter = injected(texts_of(expected), 0.7)
    options = {"max_model_len": 256, "kv_cache_memory_bytes": 17 * page_bytes}
    with drafting(name, 4, drafter, **options) as llm:
        assert run_together(llm) == expected
        assert llm.stats().num_preemptions > 0


@MODELS
def test_prefix_hits_are_of_tokens_that_were_said(name: str) -> None:
    """Drafts at acceptance 0.6 fill pages with rejected tokens first; none may be found later."""
    expected = list(undisturbed(name))
    drafter = injected(texts_of(expected), 0.6)
    with drafting(name, 5, drafter) as llm:
        asked = requests(llm.spec.vocab_size)
        assert run_one_by_one(llm) == expected
        # each answer as the beginning of a prompt, so that pages of output are hit
        longer = [[*s[0], *s[2][0][1]] for s in expected]
        params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
        before = llm.stats().prefix_hits_tokens
        again = [llm.generate([p], params, use_tqdm=False)[0] for p in longer]
        assert llm.stats().prefix_hits_tokens > before
        assert len(asked) == len(again)
    with start(name, enable_prefix_caching=False) as llm:
        cold = [llm.generate([p], params, use_tqdm=False)[0] for p in longer]
    assert [signature(o) for o in again] == [signature(o) for o in cold]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hy_v3:w4a8", {}),
        ("qwen3_moe:w8a8", {"kv_cache_dtype": "int8", "kv_hadamard": True}),
        ("hy_v3", {"enforce_eager": True, "dtype": "float32"}),
        ("qwen3_moe", {"num_threads": 2, "kv_cache_dtype": "fp8"}),
    ],
)
def test_formats_and_devices_change_nothing(name: str, options: dict[str, Any]) -> None:
    with start(name, **options, enable_prefix_caching=False) as llm:
        expected = run_one_by_one(llm)
    drafter = injected(texts_of(expected), 0.8)
    with drafting(name, 3, drafter, **options) as llm:
        assert run_together(llm) == expected


ENDS = [([5, 6, 7, 8], GREEDY.with_(max_tokens=n, ignore_eos=True)) for n in (1, 2, 3, 4, 6, 7)] + [
    ([9, 3, 9, 3], SAMPLED.with_(max_tokens=n, seed=n)) for n in (5, 30)
]


def test_a_run_of_accepted_tokens_ends_where_the_sequence_does() -> None:
    """max_tokens and the context inside a run; nothing beyond is told, counted or scored."""
    with start("tiny-hy3", max_model_len=16, enable_prefix_caching=False) as llm:
        expected = [signature(llm.generate([p], s, use_tqdm=False)[0]) for p, s in ENDS]
    long = GREEDY.with_(max_tokens=40, ignore_eos=True)
    with start("tiny-hy3") as llm:
        beyond = [
            signature(llm.generate([p], s.with_(max_tokens=40), use_tqdm=False)[0])
            for p, s in [*ENDS, (ENDS[0][0], long)]
        ]
    for num_drafts in (2, 8):
        drafter = injected(texts_of(beyond), 1.0)
        with drafting("tiny-hy3", num_drafts, drafter, max_model_len=16) as llm:
            outputs = llm.generate([p for p, _ in ENDS], [s for _, s in ENDS], use_tqdm=False)
            told = sum(len(c.token_ids) for o in outputs for c in o.outputs)
            assert llm.stats().generation_tokens == told
        assert [signature(o) for o in outputs] == expected
        assert {len(o.outputs[0].token_ids) for o in outputs} >= {1, 2, 3, 4, 6, 7, 12}


def test_stop_strings_and_stop_tokens_end_inside_a_run() -> None:
    prompt = "The little cat"
    plain = SamplingParams(temperature=0.0, max_tokens=40, logprobs=1)
    with start("tiny-hy3") as llm:
        whole = llm.generate([prompt], plain, use_tqdm=False)[0]
        text, tokens = whole.outputs[0].text, whole.outputs[0].token_ids
        asked = [plain.with_(stop=[text[at : at + 5]]) for at in range(8, len(text) - 8, 9)]
        asked += [plain.with_(stop_token_ids=[tokens[at]]) for at in (3, 7, 12)]
        asked += [plain.with_(stop=[text[20:26]], include_stop_str_in_output=True)]
        asked += [plain.with_(stop_token_ids=[tokens[2]], min_tokens=6)]
        expected = [signature(llm.generate([prompt], s, use_tqdm=False)[0]) for s in asked]
    drafter = injected([(*whole.prompt_token_ids, *tokens)], 1.0)
    with drafting("tiny-hy3", 5, drafter) as llm:
        found = llm.generate([prompt] * (len(asked) - 1), asked[:-1], use_tqdm=False)
        assert llm.stats().num_steps < 15
        found += llm.generate([prompt], asked[-1], use_tqdm=False)
    assert [signature(o) for o in found] == expected


def drive(engine: Engine) -> dict[str, tuple[Any, ...]]:
    """Steps until nothing is left; what each request was told, in the order it was told."""
    told: dict[str, list[Any]] = {}
    while engine.has_work():
        for delta in engine.step().deltas:
            parts = told.setdefault(delta.request_id, [[], [], "", None, None])
            parts[0] += delta.token_ids
            parts[1] += delta.logprobs
            parts[2] += delta.text
            parts[3] = delta.finish_reason or parts[3]
            parts[4] = delta.error or parts[4]
    return {name: tuple(parts) for name, parts in told.items()}


SCRIPTS = (
    "5|6|7 8|9 10|11|12|13 14 15|16 17|18|19 20|21",
    "30|31 32|33 34|35 36|37 38|39 40|41 42|43 44|45",
    "100|101|102|103 100|101|102|103 !7",
    "50|51 -52|53 54",
)


def test_masks_follow_the_accepted_drafts() -> None:
    """Scripted grammars beside free neighbours, with drafts that the grammar refuses and allows."""
    prompts = [[7 + i, 8, 9 + 2 * i] for i in range(len(SCRIPTS))]
    results = []
    for num_drafts in (0, 3):
        config: dict[str, Any] = dict(OPTIONS)
        texts: list[tuple[int, ...]] = []
        if num_drafts:
            texts = [(*p, *results[0][str(i)][0], 8, 8, 8) for i, p in enumerate(prompts)]
            texts += [(1, 2, 3, *results[0]["free"][0])]
            speculation = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
            config["speculative_config"] = speculation
        with pytest.MonkeyPatch.context() as patch:
            if num_drafts:
                makes = partial(lambda found, *_, **__: found, injected(texts, 0.8))
                patch.setattr("moestro.engine.build.make_drafter", makes)
            built = build_engine(EngineConfig.from_kwargs(**config), grammar=compile_script)
        engine, processor = built.engine, built.processor
        for i, script in enumerate(SCRIPTS):
            params = SamplingParams(
                temperature=0.9, seed=i, logprobs=2, grammar=GrammarSpec("scripted", script)
            )
            engine.add_request(processor.process(prompts[i], params, request_id=str(i)))
        params = SamplingParams(temperature=0.8, seed=4, max_tokens=20, logprobs=1)
        engine.add_request(processor.process([1, 2, 3], params, request_id="free"))
        results.append(drive(engine))
        engine.close()
    assert results[1] == results[0]
    assert [len(results[0][str(i)][0]) for i in range(4)] == [8, 9, 2, 1]  # with the stop token


@given(st.data())
@settings(max_examples=6, deadline=None)
def test_arrivals_and_aborts_change_nothing(data: st.DataObject) -> None:
    """The workload's requests come at any step beside others that leave at any step."""
    name = data.draw(st.sampled_from(NAMES))
    expected = list(undisturbed(name))
    drafter = injected(texts_of(expected), data.draw(st.sampled_from((0.3, 0.8, 1.0))))
    options = {"max_num_batched_tokens": data.draw(st.sampled_from((9, 40, 2048)))}
    with drafting(name, data.draw(st.integers(1, 8)), drafter, **options) as llm:
        built = llm._open()
        engine, processor = built.engine, built.processor
        asked = requests(llm.spec.vocab_size)
        order = data.draw(st.permutations(range(len(asked))))
        told: dict[str, list[int]] = {}

        def step() -> None:
            for delta in engine.step().deltas:
                key = f"{delta.request_id}/{delta.index}"
                told.setdefault(key, []).extend(delta.token_ids)

        for number in order:
            prompt, params = asked[number]
            request = processor.process(
                list(prompt), params, request_id=str(number), submission=number
            )
            engine.add_request(request)
            gone = processor.process([*prompt, 9], SAMPLED, request_id="gone", submission=99)
            engine.add_request(gone)
            for _ in range(data.draw(st.integers(0, 6))):
                if engine.has_work():
                    step()
            engine.abort("gone")
        while engine.has_work():
            step()
    for number, result in enumerate(expected):
        for choice in result[2]:
            assert tuple(told[f"{number}/{choice[0]}"]) == choice[1]


def test_the_workload_accepts_drafts() -> None:
    """Else the equalities above would say nothing."""
    expected = list(undisturbed("tiny-hy3"))
    steps = {}
    for acceptance in (0.0, 0.5, 1.0):
        drafter = injected(texts_of(expected), acceptance)
        with drafting("tiny-hy3", 4, drafter) as llm:
            assert run_one_by_one(llm) == expected
            steps[acceptance] = llm.stats().num_steps
    assert steps[1.0] < 0.5 * steps[0.0]
    assert steps[1.0] < steps[0.5] < steps[0.0]


def test_drafts_of_the_mtp_layer_and_of_both_change_nothing() -> None:
    expected = list(undisturbed("tiny-hy3"))
    for method in ("mtp", "hybrid"):
        config = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
        given = OPTIONS | model_options("tiny-hy3") | {"speculative_config": config}
        with LLM(**given) as llm:
            assert run_together(llm) == expected
            before = llm.stats().num_steps
            assert run_one_by_one(llm)[:-1] == expected[:-1]
            assert before > 0
