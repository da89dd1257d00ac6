"""ExpertCounter: every routed token counted once, told now and then."""

import torch
from tests.fakes.parameters import tensors_of
from tests.runner.stepping import Cranker, Stream
from tests.runner.test_model_runner import HY3, PAGE_SIZE, PAGES

from moestro.core.sampling_params import SamplingParams
from moestro.core.step import ExpertTokens, Schedule, StepOutput
from moestro.layers.parameters import Parameters
from moestro.models.registry import build_model
from moestro.runner.expert_counter import REPORT_STEPS, ExpertCounter
from moestro.runner.kv_pool import KVPool
from moestro.runner.model_runner import ModelRunner


def _runner() -> ModelRunner:
    model = build_model(HY3, Parameters(torch.float32))
    generator = torch.Generator().manual_seed(0)
    for parameter in tensors_of(model.weights).values():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    pool = KVPool(HY3, PAGES, PAGE_SIZE, torch.float32)
    return ModelRunner(model, pool, max_num_seqs=4, max_model_len=256)


def _total(told: ExpertTokens) -> int:
    return sum(sum(counts) for _, counts in told.rows())


def test_every_token_is_counted_top_k_times() -> None:
    assert HY3.moe is not None
    runner = _runner()
    cranker = Cranker(runner, PAGES, PAGE_SIZE)
    cranker.add(3, Stream((5, 6, 7, 8, 9), SamplingParams(temperature=0.0)))
    told: list[ExpertTokens | None] = []
    execute = runner.execute

    def spy(schedule: Schedule) -> StepOutput:
        output = execute(schedule)
        told.append(output.expert_tokens)
        return output

    runner.execute = spy  # type: ignore[method-assign]
    cranker.step([(3, 5)])
    cranker.decode([3], REPORT_STEPS - 1)
    assert told[:-1] == [None] * (REPORT_STEPS - 1)
    assert told[-1] is not None
    assert told[-1].layers == (1,)  # layer 0 is dense
    tokens = 5 + REPORT_STEPS - 1
    assert _total(told[-1]) == tokens * HY3.moe.num_experts_per_tok
    last = execute(Schedule(999, (), released=(3,)))
    assert last.expert_tokens is not None
    assert _total(last.expert_tokens) == 0


def test_a_long_step_is_told_at_once() -> None:
    counter = ExpertCounter(build_model(HY3, Parameters(torch.float32)))
    assert counter.due(8191) is None
    assert counter.due(1) is not None
    assert counter.due(1) is None
