"""The real scheduler, prefix cache and preemption over the history model."""

import random

import pytest
from tests.runner.history_model import POISON, expected_logits, history_runner

from moestro.core.request import Request
from moestro.core.sampling_params import SamplingParams
from moestro.kvcache import KVCacheManager
from moestro.scheduler import Scheduler, SchedulerLimits

PARAMS = SamplingParams(
    temperature=0.0, max_tokens=12, logit_bias=((POISON, -100.0),), prompt_logprobs=None
)


@pytest.mark.parametrize("seed", range(6))
def test_scheduled_tokens_follow_from_the_tokens_before_them(seed: int):
    rng = random.Random(seed)
    page_size, num_pages = 4, 16  # too few pages for all: preemption
    scheduler = Scheduler(
        SchedulerLimits(6, rng.choice((5, 11, 32)), 64),
        KVCacheManager(num_pages, page_size, enable_prefix_caching=True),
    )
    runner = history_runner(num_pages=num_pages, page_size=page_size, max_num_seqs=6)
    shared = tuple(rng.randrange(POISON) for _ in range(12))
    prompts: dict[str, tuple[int, ...]] = {}
    outputs: dict[str, list[int]] = {}
    while len(prompts) < 14 or scheduler.has_work():
        if len(prompts) < 14 and rng.random() < 0.9:
            name = f"r{len(prompts)}"
            own = tuple(rng.randrange(POISON) for _ in range(rng.randrange(1, 9)))
            prompts[name] = shared[: rng.choice((0, 6, 8, 12))] + own
            outputs[name] = []
            scheduler.add(_request(name, prompts[name]))
        if rng.random() < 0.03 and prompts:
            victim = rng.choice(list(prompts))
            scheduler.abort(victim)
        schedule = scheduler.schedule()
        if schedule is None:
            continue
        for update in scheduler.update(schedule, runner.execute(schedule)):
            outputs[update.request_id] += update.new_token_ids
    stats = scheduler.stats()
    assert stats.prefix_hits_tokens > 0
    assert stats.num_preemptions > 0
    for name, output in outputs.items():
        tokens = list(prompts[name])
        for token in output:
            assert token == int(expected_logits(tokens)[:POISON].argmax()), name
            tokens.append(token)
    assert sum(len(o) == PARAMS.max_tokens for o in outputs.values()) >= 10


def _request(name: str, prompt: tuple[int, ...]) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=PARAMS, seed=0, max_tokens=12)
