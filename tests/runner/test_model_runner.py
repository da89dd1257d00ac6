"""ModelRunner over small random models: the same bits whatever else is in a step."""

from dataclasses import replace

import pytest
import torch
from tests.fakes.parameters import tensors_of
from tests.runner.stepping import Cranker, Stream, alone

import moestro.backends.cpu  # noqa: F401 -- registers the bodies
from moestro.core.model_spec import ModelSpec, MoeSpec, RopeSpec
from moestro.core.sampling_params import SamplingParams
from moestro.layers.parameters import Parameters
from moestro.models.registry import build_model
from moestro.runner.kv_pool import KVPool
from moestro.runner.model_runner import ModelRunner

PAGES, PAGE_SIZE, STEPS = 96, 4, 7
VOCAB = 383

QWEN = ModelSpec(
    model_type="qwen3_moe",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    moe=MoeSpec(6, 2, 16, 0, "softmax", False, True, 0.0, 1.0, False),
    moe_layers=(True, False),
    num_mtp_layers=0,
    rms_norm_eps=1e-6,
    rope=RopeSpec(theta=1e4),
    max_position_embeddings=256,
    tie_word_embeddings=False,
    dtype="float32",
    eos_token_ids=(),
)
HY3 = replace(
    QWEN,
    model_type="hy_v3",
    moe=MoeSpec(6, 3, 16, 1, "sigmoid", True, True, 1e-20, 2.5, True),
    moe_layers=(False, True),
    tie_word_embeddings=True,
)

PARAMS = (
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=1.0, logprobs=0, prompt_logprobs=2),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, logprobs=1),
    SamplingParams(temperature=1.2, top_p=0.8, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(temperature=1.0, min_p=0.05, frequency_penalty=1.0, prompt_logprobs=0),
    SamplingParams(temperature=1.5, logit_bias=((3, 4.0), (5, -3.0)), min_tokens=4, logprobs=5),
)


@pytest.fixture(
    scope="module",
    params=[(QWEN, torch.float32), (HY3, torch.float32), (HY3, torch.bfloat16)],
    ids=lambda p: f"{p[0].model_type} {str(p[1]).removeprefix('torch.')}",
)
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    spec, dtype = request.param
    model = build_model(spec, Parameters(dtype))
    g = torch.Generator().manual_seed(5)
    for name, parameter in sorted(tensors_of(model.weights).items()):
        scale = 0.3 if parameter.dim() > 1 else 0.1
        drawn = torch.randn(parameter.shape, generator=g) * scale
        parameter.copy_(drawn + 1 if "norm" in name else drawn)
    pool = KVPool(spec, PAGES, PAGE_SIZE, dtype)
    return ModelRunner(model, pool, max_num_seqs=8, max_model_len=96)


def stream(i: int) -> Stream:
    g = torch.Generator().manual_seed(100 + i)
    prompt = torch.randint(0, VOCAB, (3 + 4 * i,), generator=g).tolist()
    params = PARAMS[i % len(PARAMS)]
    return Stream(tuple(prompt), params, seed=i - 2, sample_index=i % 3, stop_token_ids=STOP)


STOP = frozenset({1, 2})


def same(one: Stream, other: Stream) -> None:
    assert one.error is None
    assert one.output == other.output
    assert one.logprobs == other.logprobs
    assert one.prompt_logprobs == other.prompt_logprobs


@pytest.mark.parametrize("chunks", [[1] * 40, [5, 1, 9], [8, 8, 8], [3, 20]])
def test_a_chunked_prompt_equals_a_whole_one(runner: ModelRunner, chunks: list[int]):
    for i in (2, 4, 5, 1):
        expected = alone(runner, PAGES, PAGE_SIZE, stream(i), STEPS)
        cranker = Cranker(runner, PAGES, PAGE_SIZE)
        mine = cranker.add(0, stream(i))
        for chunk in [*chunks, 99]:
            if not mine.output:
                cranker.step([(0, chunk)])
        cranker.decode([0], STEPS - 1)
        cranker.close()
        same(mine, expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_mixed_batch_equals_its_members(runner: ModelRunner, threads: int):
    expected = [alone(runner, PAGES, PAGE_SIZE, stream(i), STEPS) for i in range(6)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cranker = Cranker(runner, PAGES, PAGE_SIZE, shuffle_seed=4)
        mine = [cranker.add(i, stream(i)) for i in range(6)]
        # Sequence i starts at step i and prefills 5 tokens a step while the others decode.
        for step in range(STEPS + 12):
            live = [i for i in range(min(step + 1, 6)) if len(mine[i].output) < STEPS]
            if step % 2:
                live.reverse()
            if live:
                cranker.step([(i, 5) for i in live])
        cranker.close()
    finally:
        torch.set_num_threads(before)
    for one, other in zip(mine, expected, strict=True):
        assert len(one.output) == STEPS
        same(one, other)


def test_a_preempted_sequence_goes_on_as_if_nothing_had_been(runner: ModelRunner):
    for i in range(6):
        expected = alone(runner, PAGES, PAGE_SIZE, stream(i), STEPS)
        cranker = Cranker(runner, PAGES, PAGE_SIZE, shuffle_seed=2)
        cranker.add(0, stream(i))
        neighbour = cranker.add(9, stream(3))
        cranker.step([(9, 4), (0, 99)])
        cranker.step([(0, 1), (9, 99)])
        mine = cranker.add(1, cranker.release(0))
        cranker.step([(9, 1), (1, 2)])
        while len(mine.output) < STEPS:
            cranker.step([(1, 6), (9, 1)])
        cranker.close()
        same(mine, expected)
        assert neighbour.error is None


def test_two_runs_agree_and_seeds_matter(runner: ModelRunner):
    first = alone(runner, PAGES, PAGE_SIZE, stream(1), 20)
    same(alone(runner, PAGES, PAGE_SIZE, stream(1), 20), first)
    for change in ({"seed": 77}, {"sample_index": 2}):
        other = alone(runner, PAGES, PAGE_SIZE, replace(stream(1), **change), 20)
        assert other.output != first.output


def test_close_gives_the_pages_back():
    spec = replace(QWEN, num_hidden_layers=1, moe_layers=(False,))
    pool = KVPool(spec, 4, 4, torch.float32)
    layer = pool.layers[0]
    model = build_model(spec, Parameters(torch.float32))
    runner = ModelRunner(model, pool, max_num_seqs=1, max_model_len=16)
    runner.close()
    runner.close()
    assert layer.k.untyped_storage().nbytes() == 0
