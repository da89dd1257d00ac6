"""Decode steps through captured graphs: the same bits as eager ones, whatever came before."""

import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests.fakes.parameters import tensors_of
from tests.runner.stepping import Cranker, Stream
from tests.runner.test_model_runner import HY3, PAGE_SIZE, PAGES, PARAMS, QWEN, STOP, VOCAB

from moestro.backends import load_backend
from moestro.backends.cpu import library
from moestro.core.model_spec import ModelSpec
from moestro.core.sampling_params import SamplingParams
from moestro.core.step import NewSequence, Schedule, ScheduledSequence
from moestro.layers.moe import pack_routers
from moestro.layers.parameters import Parameters
from moestro.models.causal_lm import CausalLM
from moestro.models.registry import build_model
from moestro.runner.graphs import capture_sizes
from moestro.runner.kv_pool import KVPool
from moestro.runner.model_runner import ModelRunner

pytestmark = pytest.mark.skipif(not library.has_native(), reason="no kernel library was built here")
if library.has_native():
    from moestro.backends.cpu.graph import TorchOps

GREEDY = SamplingParams(temperature=0.0, logprobs=2)


def make_model(spec: ModelSpec, dtype: torch.dtype) -> CausalLM:
    model = build_model(spec, Parameters(dtype))
    g = torch.Generator().manual_seed(5)
    for name, parameter in sorted(tensors_of(model.weights).items()):
        drawn = torch.randn(parameter.shape, generator=g) * (0.3 if parameter.dim() > 1 else 0.1)
        parameter.copy_(drawn + 1 if "norm" in name else drawn)
    pack_routers(model, load_backend("cpu"), dtype)
    model.prepare_positions(96)
    return model


def make(spec: ModelSpec, dtype: torch.dtype, *, graphs: bool, **options: Any) -> ModelRunner:
    device = load_backend("cpu")
    model = make_model(spec, dtype)
    pool = KVPool(spec, PAGES, PAGE_SIZE, dtype)
    graph_pool = device.graph_pool() if graphs else None
    options = {"max_num_seqs": 8, "max_model_len": 96, "graph_pool": graph_pool} | options
    return ModelRunner(model, pool, **options)


def stream(i: int, params: SamplingParams) -> Stream:
    g = torch.Generator().manual_seed(100 + i)
    prompt = torch.randint(0, VOCAB, (3 + 2 * i,), generator=g).tolist()
    return Stream(tuple(prompt), params, seed=i, sample_index=i % 3, stop_token_ids=STOP)


def run(runner: ModelRunner) -> list[Stream]:
    """Prefill, then decode in batches of several sizes and orders, with a release in between."""
    cranker = Cranker(runner, PAGES, PAGE_SIZE)
    streams = [cranker.add(i, stream(i, PARAMS[i])) for i in range(6)]
    for i in range(6):
        cranker.step([(i, 99)])
    cranker.decode([0, 1, 2, 3, 4, 5], 6)
    cranker.decode([2], 9)
    cranker.decode([5, 3, 1], 7)
    cranker.release(4)
    cranker.decode([3, 0, 2, 5, 1], 5)
    cranker.step([(0, 1), (2, 1)])
    return streams


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", [QWEN, HY3], ids=lambda spec: spec.model_type)
@pytest.mark.parametrize("warm", [True, False])
def test_replay_gives_the_bits_of_eager_steps(
    spec: ModelSpec, dtype: torch.dtype, warm: bool
) -> None:
    eager, captured = make(spec, dtype, graphs=False), make(spec, dtype, graphs=True)
    if warm:
        captured.warm_up()
    for one, other in zip(run(captured), run(eager), strict=True):
        assert one.error is None
        assert one.output == other.output
        assert one.logprobs == other.logprobs
        assert one.prompt_logprobs == other.prompt_logprobs
    assert captured.num_graphs == (7 if warm else 5)  # 8, 4, 2, 1 and 6, 3, 5; cold: those met


def test_warm_up_captures_each_size_once_and_tells() -> None:
    runner = make(HY3, torch.bfloat16, graphs=True)
    told: list[tuple[int, int]] = []
    runner.warm_up(lambda done, total: told.append((done, total)))
    assert told == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert runner.num_graphs == 4
    assert runner.graph_summary.startswith("4 batch sizes")


@pytest.mark.parametrize(
    ("seqs", "tokens", "drafts", "sizes"),
    [
        (1, 1, 0, [(1, 1)]),
        (8, 8, 0, [(8, 1), (4, 1), (2, 1), (1, 1)]),
        (100, 100, 0, [(n, 1) for n in (100, 64, 32, 16, 8, 4, 2, 1)]),
        (9, 3, 0, [(3, 1), (2, 1), (1, 1)]),
        (4, 99, 3, [(4, 4), (2, 4), (1, 4), (4, 1), (1, 3), (1, 2), (2, 1), (1, 1)]),
        (4, 9, 3, [(2, 4), (1, 4), (4, 1), (1, 3), (1, 2), (2, 1), (1, 1)]),
    ],
)
def test_sizes_that_are_captured(
    seqs: int, tokens: int, drafts: int, sizes: list[tuple[int, int]]
) -> None:
    assert list(capture_sizes(seqs, tokens, drafts)) == sizes


def test_threads_and_levels_may_change_between_steps() -> None:
    native = library.native()
    before = native.num_threads()
    runner, eager = make(HY3, torch.float32, graphs=True), make(HY3, torch.float32, graphs=False)
    mine, theirs = Cranker(runner, PAGES, PAGE_SIZE), Cranker(eager, PAGES, PAGE_SIZE)
    streams = [c.add(0, stream(0, GREEDY)) for c in (mine, theirs)]
    try:
        for cranker in (mine, theirs):
            cranker.step([(0, 99)])
            for threads in (1, 2, 3, 1):
                native.set_num_threads(threads)
                cranker.decode([0], 3)
            for level in native.levels():
                with native.at_level(level):
                    cranker.decode([0], 2)
    finally:
        native.set_num_threads(before)
    assert streams[0].token_ids == streams[1].token_ids
    assert streams[0].logprobs == streams[1].logprobs


def test_pages_that_were_given_ahead_are_read_when_they_are_reached() -> None:
    def tokens(runner: ModelRunner) -> list[int]:
        new = NewSequence(0, (5, 6, 7), 3, GREEDY, 0, 0, frozenset())
        given, found, start = (9, 4, 30, 2, 11, 7), [], 0
        for step, count in enumerate((3, *[1] * 18)):
            item = ScheduledSequence(0, start, count, () if step else given, True)
            output = runner.execute(Schedule(step, (item,), () if step else (new,)))
            found += output.sequences[0].token_ids
            start += count
        return found

    assert tokens(make(HY3, torch.float32, graphs=True)) == tokens(
        make(HY3, torch.float32, graphs=False)
    )


def test_a_step_that_cannot_be_captured_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    runner, eager = (make(HY3, torch.float32, graphs=on) for on in (True, False))
    forward = CausalLM.forward

    def with_torch(self: CausalLM, *args: Any) -> torch.Tensor:
        return forward(self, *args) + 0

    results = []
    with pytest.MonkeyPatch.context() as patch:
        for each in (runner, eager):
            cranker = Cranker(each, PAGES, PAGE_SIZE)
            results.append(cranker.add(0, stream(0, GREEDY)))
            cranker.step([(0, 99)])
            patch.setattr(CausalLM, "forward", with_torch)
            cranker.decode([0], 9)
            patch.undo()
    assert results[0].token_ids == results[1].token_ids
    assert runner.num_graphs == 0
    assert "torch computes aten.add" in caplog.text


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("spec", [QWEN, HY3], ids=lambda spec: spec.model_type)
def test_torch_computes_nothing_in_a_step(spec: ModelSpec, graphs: bool) -> None:
    # Prefill, a mixed batch, decode; greedy and sampled.
    runner = make(spec, torch.bfloat16, graphs=graphs)
    cranker = Cranker(runner, PAGES, PAGE_SIZE)
    for i, params in enumerate((GREEDY, PARAMS[2], PARAMS[3])):
        cranker.add(i, stream(i, params))
    runner.warm_up()
    computing: list[str] = []
    with TorchOps(computing.append):
        cranker.step([(0, 99), (1, 2)])
        cranker.step([(0, 1), (1, 99), (2, 99)])
        cranker.decode([0, 1, 2], 3)
    assert computing == []


def test_a_replayed_step_runs_no_layer_in_python() -> None:
    runner = make(HY3, torch.bfloat16, graphs=True)
    cranker = Cranker(runner, PAGES, PAGE_SIZE)
    for i in range(2):
        cranker.add(i, stream(i, GREEDY))
        cranker.step([(i, 99)])
    cranker.decode([0, 1], 2)
    files: set[str] = set()
    inside: list[str] = []
    replaying = [False]

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "return"):
            return
        name = frame.f_code.co_qualname
        if name == "CapturedStep.replay":
            replaying[0] = event == "call"
        elif replaying[0]:
            inside.append(name)
        files.add(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        cranker.decode([0, 1], 1)
    finally:
        sys.setprofile(None)
    assert inside == []
    ran = {Path(file).stem for file in files}
    assert {"graphs", "sampler"} <= ran
    assert not ran & {"hy_v3", "decoder", "attention", "moe", "linear", "norm"}


def test_capturing_imports_no_compiler() -> None:
    # torch wraps the dispatch mode's handler in what imports it: a second of every start.
    script = (
        "import sys; from moestro.config import EngineConfig; "
        "from moestro.engine.build import build_engine; "
        "built = build_engine(EngineConfig(weight_cache='off', max_num_seqs=1)); "
        "assert 'torch._dynamo' not in sys.modules, 'torch._dynamo was imported'"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
