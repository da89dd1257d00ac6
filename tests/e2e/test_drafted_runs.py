"""Drafts on real models, in every way that a runner may be driven: the bits of no drafts."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.e2e.drafted import drafting, injected
from tests.e2e.workload import NEEDS_KERNELS
from tests.runner.stepping import Cranker, Stream, alone

from moestro.core.sampling_params import SamplingParams
from moestro.runner.model_runner import ModelRunner
from moestro.speculative.injected import InjectedDrafter, KnownTexts

pytestmark = NEEDS_KERNELS

PAGE_SIZE, PAGES, LENGTH = 16, 60, 24
MODELS = ("tiny-hy3", "hy_v3", "qwen3_moe", "tiny-hy3:w4a8", "qwen3_moe:w8a8")
PARAMS = (
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=1.0, logprobs=0, prompt_logprobs=2),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, logprobs=1),
    SamplingParams(temperature=1.2, repetition_penalty=1.3, presence_penalty=0.5, logprobs=2),
    SamplingParams(
        temperature=1.5, frequency_penalty=1.0, logit_bias=((3, 4.0),), min_tokens=9, logprobs=1
    ),
)


def make(i: int) -> Stream:
    prompt = tuple(3 + (7 + 2 * i) * j * j % 290 for j in range(4 + 9 * i))
    return Stream(
        prompt, PARAMS[i % len(PARAMS)], seed=i, sample_index=i % 3, stop_token_ids=frozenset({2})
    )


class Setting:
    """One engine's runner, and what each stream gives without drafts."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.drafter = injected([], 0.0)
        self._engine = drafting(name, 8, self.drafter, **options)
        llm = self._engine.__enter__()
        runner = llm._open().engine._runner
        assert isinstance(runner, ModelRunner)
        self.runner = runner
        self.expected = [alone(runner, PAGES, PAGE_SIZE, make(i), LENGTH) for i in range(5)]

    def close(self) -> None:
        self._engine.__exit__(None, None, None)

    def draft(self, acceptance: float, seed: int) -> None:
        """What the drafter proposes from now on."""
        texts = KnownTexts([s.token_ids for s in self.expected])
        fresh = InjectedDrafter(texts, (acceptance,), 300, seed=seed)
        vars(self.drafter).update(vars(fresh))


@pytest.fixture(scope="module", params=MODELS)
def each(request: pytest.FixtureRequest) -> Iterator[Setting]:
    kv = {"kv_cache_dtype": "int8"} if ":" in request.param else {}
    found = Setting(request.param, kv)
    yield found
    found.close()


@given(st.data())
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_schedule_says_what_no_drafts_say(each: Setting, data: st.DataObject) -> None:
    """Arrivals, chunks, widths, orders, preemptions, plans made ahead; any acceptance."""
    each.draft(data.draw(st.sampled_from((0.0, 0.5, 0.8, 1.0))), data.draw(st.integers(0, 9)))
    cranker = Cranker(each.runner, PAGES, PAGE_SIZE, data.draw(st.integers(0, 9)))
    owners: dict[int, int] = {}
    waiting, next_id = [0, 1, 2, 3, 4], 100 * data.draw(st.integers(1, 9))
    try:
        for _ in range(60):
            if waiting and (not owners or data.draw(st.booleans())):
                cranker.add(next_id, make(waiting[0]))
                owners[next_id] = waiting.pop(0)
                next_id += 1
            live = [s for s in owners if len(cranker.streams[s].output) < LENGTH - 8]
            if not live and not waiting:
                break
            if live and data.draw(st.integers(0, 9)) == 0:
                seq_id = data.draw(st.sampled_from(live))
                stream = cranker.release(seq_id)
                cranker.add(next_id, stream)
                owners[next_id] = owners.pop(seq_id)
                live[live.index(seq_id)] = next_id
                next_id += 1
            wishes = [(s, data.draw(st.integers(1, 20))) for s in data.draw(st.permutations(live))]
            widths = st.tuples(*[st.sampled_from((0, 1, 2, 3, 5, 8))] * 2)
            drafts = {s: data.draw(widths) for s in live}
            cranker.step(wishes[:4], drafts=drafts, ahead=data.draw(st.booleans()))
    finally:  # an example may end anywhere, and the next one has the same runner
        cranker.close()
    for seq_id, index in owners.items():
        mine, other = cranker.streams[seq_id], each.expected[index]
        assert mine.error is None
        count = min(len(mine.output), LENGTH)
        assert mine.output[:count] == other.output[:count]
        if mine.params.logprobs is not None:
            assert mine.logprobs[:count] == other.logprobs[:count]
        if mine.output:
            assert mine.prompt_logprobs == other.prompt_logprobs


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 5, 8])
def test_every_number_of_drafts_says_the_same(each: Setting, num_drafts: int) -> None:
    each.draft(0.8, num_drafts)
    cranker = Cranker(each.runner, PAGES, PAGE_SIZE)
    streams = [cranker.add(1000 + i, make(i)) for i in range(5)]
    accepted = []
    while live := [i for i, s in enumerate(streams) if len(s.output) < LENGTH - 8]:
        wishes = [(1000 + i, 30) for i in live]
        cranker.step(wishes, drafts={1000 + i: (num_drafts, num_drafts) for i in live})
        accepted += [streams[i].accepted[-1] for i in live if streams[i].accepted]
    cranker.close()
    for mine, other in zip(streams, each.expected, strict=True):
        count = min(len(mine.output), LENGTH)
        assert mine.output[:count] == other.output[:count]
        assert mine.logprobs[:count] == other.logprobs[: count if mine.logprobs else 0]
    assert set(accepted) >= {0, num_drafts}
