"""`moestro bench kernels` and `moestro bench ladder`: flags, a short run, tokens equal."""

import json

import pytest
import torch
from tests.cli.terminal import main

from moestro import ops
from moestro.backends import load_backend
from moestro.backends.cpu import library
from moestro.cli.bench import resident
from moestro.cli.bench.ladder import RUNGS, same_prefix, steps_of
from moestro.cli.bench.pairing import Round
from moestro.cli.bench.works import unfused
from moestro.cli.bench.works.attention import CUTS, DIM, make_batch, other_cuts
from moestro.cli.bench.works.matmul import Shape

TINY = ("--engine", '{"kv_cache_memory_bytes": "8MiB", "max_model_len": 256}', "--steps", "2")


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a benchmark fail that builds an engine."""

    def refuse(*_: object) -> None:
        raise AssertionError("an engine is built")

    monkeypatch.setattr(resident, "build", refuse)


def test_gains_multiply_up() -> None:
    seconds = {rung.name: 2.0**-at for at, rung in enumerate(RUNGS)}
    tokens = {rung.name: [[1, 2, 3]] for rung in RUNGS}
    tokens[RUNGS[-1].name] = [[1, 2, 4]]
    told = steps_of([Round(seconds, 1.0, 1.0)] * 2, tokens, 10)
    assert [r["step_gain"] for r in told] == [1.0, *[2.0] * (len(RUNGS) - 1)]
    assert [r["gain"] for r in told] == [2.0**at for at in range(len(RUNGS))]
    assert told[0]["ms_per_token"] == 100.0
    assert [r["equal_tokens"] for r in told] == [*[True] * (len(RUNGS) - 1), False]
    assert told[-1]["same_tokens"] == [2]


def test_prefix_that_agrees() -> None:
    assert same_prefix([[1, 2], [3, 4]], [[1, 2], [5, 4]]) == [2, 0]


@pytest.mark.parametrize("shared", [0, 48])
def test_a_loop_over_experts_gives_the_fused_bits(shared: int) -> None:
    load_backend("cpu")
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    tokens, hidden, inner, num_experts, top_k = 64, 256, 96, 16, 8
    x = draw(tokens, hidden).float()  # the result is not rounded to bf16: every bit shows
    keys = torch.rand((tokens, num_experts), generator=generator)
    weights = torch.rand((tokens, top_k), generator=generator)
    routing = ops.Routing(keys.argsort(dim=1)[:, :top_k].int(), weights)
    experts = ops.ExpertWeights(
        draw(num_experts, 2 * inner, hidden),
        draw(num_experts, hidden, inner),
        draw(2 * shared, hidden) if shared else None,
        draw(hidden, shared) if shared else None,
    )
    fused = ops.moe_experts(x, routing, experts, True)
    assert torch.equal(unfused.moe_experts(x, routing, experts, True), fused)


def test_ladder_of_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--pairs", "1", "--steps", "4", "--input-len", "9", "--batch-size", "2"]
    kv = '{"kv_cache_memory_bytes": "64MiB", "max_model_len": 256}'
    arguments = ["bench", "ladder", *few, "--num-threads", "1", "--engine", kv, "--json"]
    assert main(arguments) == 0
    (ladder,) = json.loads(capsys.readouterr().out)["ladders"]
    assert [r["name"] for r in ladder["rungs"]] == [rung.name for rung in RUNGS]
    assert all(r["equal_tokens"] for r in ladder["rungs"])
    assert all(r["same_tokens"] == [5, 5] for r in ladder["rungs"])


@pytest.mark.parametrize("kv", ["bfloat16", "int8,fp8"])
def test_a_group_of_kernels(kv: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--only", "chain", "--shapes", "bench", "--num-threads", "1", "--seconds", "0.001"]
    assert main(["bench", "kernels", *small, "--kv", kv, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {row["group"] for row in told["rows"]} == {"chain"}
    for row in told["rows"]:
        assert row["engines"]["moestro"]["share_of_bound"] > 0
        assert row["engines"]["unfused torch"]["ratio"] > 0
    assert told["limits"]["bf16_flops_per_s"] > 0
    names = [row["name"] for row in told["rows"]]
    assert len(names) == len(set(names)) == 5 * len(kv.split(","))


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "fp8"])
def test_other_task_maps_give_the_same_bits(kind: str) -> None:
    sequences = ((1, 3000), (5, 700), (1, 40))
    shape = Shape("small", 64, 4, 2, 0, 0, 0, 0)
    batch = make_batch(shape, sequences, kind)
    expected = ops.paged_attention(batch.q, batch.pages, batch.metadata, DIM**-0.5)
    calls = other_cuts([batch], shape, sequences)
    assert set(calls) == set(CUTS)
    for name, call in calls.items():
        assert torch.equal(call(0), expected), name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernels", "--only", "conv"], "--only does not know conv"),
        (["kernels", "--kv", "int4"], "--kv does not know int4"),
        (["kernels", "--num-threads", "0"], "--num-threads must be 1 to 1024, got 0."),
        (["kernels", "--num-threads", "1025"], "--num-threads must be 1 to 1024, got 1025."),
        (["ladder", "--num-threads", "1025"], "--num-threads must be 1 to 1024, got 1025."),
        (["kernels", "--seconds", "0"], "--seconds must be above 0"),
        (["ladder", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["ladder", "--formats", "fp4"], "--formats does not know fp4"),
        (["kernels", "--output", "/nowhere/out.json"], "--output /nowhere/out.json can't be"),
        (["ladder", "--output", "/"], "--output / can't be written"),
        (["ladder", "--output", "/proc/nope"], "--output /proc/nope can't be written"),
        (["ladder", *TINY, "--steps", "200"], "come to 265 tokens, and max_model_len is 256"),
        (["ladder", *TINY, "--batch-size", "33"], "max_num_seqs is 32"),
    ],
)
def test_flags_that_can_not_be(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "field",
    [
        *("quantization", "quantization_group_size", "enforce_eager", "weight_cache"),
        *("num_threads", "model"),
    ],
)
def test_engine_fields_that_the_ladder_sets_itself(
    field: str, no_loading: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "ladder", "--engine", json.dumps({"seed": 1, field: "w8a8"})]) == 2
    assert f"--engine can't set {field}: " in capsys.readouterr().err


def test_no_ladder_of_the_reference(
    no_loading: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = library.open_library(None, "reference")
    monkeypatch.setattr(library, "_loaded", lambda: opened)
    assert main(["bench", "ladder"]) == 1
    assert "no CPU kernel library is in use: MOESTRO_CPU_ISA=reference" in capsys.readouterr().err


def test_a_refused_level_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--isa", "sse"]) == 2
    levels = ", ".join(library.native().levels())
    assert f"--isa sse: this machine does not run that level; it has: {levels}." in (
        capsys.readouterr().err
    )


def test_a_batch_that_memory_does_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ladder", *TINY, "--batch-size", "32", "--input-len", "250"]) == 1
    assert "need 128 KV pages, and there are" in capsys.readouterr().err
