"""MTPDrafter against the definition in float64, and what may not change its drafts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracle.configs import fresh_config
from tests.oracle.heldout import heldout_windows
from tests.speculative.drafting import (
    VOCAB,
    Bench,
    chain,
    draft_logits,
    drawn,
    loaded,
    mtp_spec,
    text,
)
from tests.speculative.hy3_float64 import Hy3Float64

from moestro.backends.cpu import library
from moestro.core.model_config import load_model_spec, parse_model_config
from moestro.core.model_spec import ModelSpec
from moestro.models.causal_lm import CausalLM
from moestro.weights.checkpoint import Checkpoint
from moestro.weights.source import resolve_model

SEED = 5
needs_kernels = pytest.mark.skipif(
    not library.has_native(), reason="no kernel library was built here"
)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, Hy3Float64]:
    return drawn(mtp_spec(), SEED, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def three_layers(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, Hy3Float64]:
    return drawn(mtp_spec(3), SEED, tmp_path_factory.mktemp("three"))


def spec_of(seed: int) -> ModelSpec:
    """A random config whose MTP layers number 1, 2 or 3."""
    config: dict[str, Any] = fresh_config("hy_v3", seed).config
    config |= {"num_nextn_predict_layers": 1 + seed % 3, "rope_parameters": {
        "rope_theta": 5e5, "rope_type": "default"}}  # fmt: skip
    return parse_model_config(config)


@pytest.mark.parametrize("num_mtp_layers", [1, 2, 3])
def test_a_chain_equals_its_definition(num_mtp_layers: int, tmp_path: Path) -> None:
    model, exact = drawn(mtp_spec(num_mtp_layers), SEED, tmp_path)
    tokens = text(23)
    with draft_logits(model) as logits:
        drafts = chain(model, tokens, 7)
    assert len(drafts) == 7
    expected = exact.draft_logits(tokens, drafts[:-1])
    np.testing.assert_allclose(torch.stack(logits), expected, rtol=0, atol=1e-4)
    assert drafts == expected.argmax(axis=1).tolist()


@pytest.mark.parametrize("seed", range(1, 7))
def test_chains_of_random_models_equal_their_definition(seed: int, tmp_path: Path) -> None:
    spec = spec_of(seed)
    model, exact = drawn(spec, seed, tmp_path)
    tokens = text(17, seed, spec.vocab_size)
    with draft_logits(model) as logits:
        drafts = chain(model, tokens, 5, cuts=(6, 11))
    expected = exact.draft_logits(tokens, drafts[:-1])
    np.testing.assert_allclose(torch.stack(logits), expected, rtol=0, atol=1e-4)


def test_chains_of_tiny_hy3_equal_their_definition() -> None:
    folder = resolve_model("tiny-hy3")
    spec = load_model_spec(folder)
    with Checkpoint.open(folder) as checkpoint:
        exact = Hy3Float64(lambda name: checkpoint.tensor(name).double().numpy(), spec)
        model, tokens = loaded(spec, folder), heldout_windows()[7][:40].tolist()
        with draft_logits(model) as logits:
            drafts = chain(model, tokens, 4, cuts=(16,))
        expected = exact.draft_logits(tokens, drafts[:-1])
    np.testing.assert_allclose(torch.stack(logits), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("cuts", [(1,), (4,), (5, 8), (3, 4, 12, 13), tuple(range(1, 22))])
@pytest.mark.parametrize("name", ["one_layer", "three_layers"])
def test_chunks_change_no_bit(
    name: str, cuts: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    model, _ = request.getfixturevalue(name)
    tokens = text(23)
    with draft_logits(model) as logits:
        whole = chain(model, tokens, 5)
        assert chain(model, tokens, 5, cuts) == whole
    assert torch.equal(torch.stack(logits[:5]), torch.stack(logits[5:]))


def verified(bench: Bench, tokens: list[int], plan: list[tuple[int, int]], count: int) -> list[int]:
    """Say `tokens` in steps of (accepted, rejected) drafts behind one token; the last drafts.

    Rejected drafts are tokens that were never said.
    """
    prompt = 5
    bench.tokens[0] = list(tokens[:prompt])
    found = bench.step([tokens[:prompt]], [tokens[prompt]], [0])
    at = prompt
    for number, (accepted, rejected) in enumerate(plan):
        wrong = [(t + 1) % VOCAB for t in tokens[at : at + rejected]]
        run = [*tokens[at : at + 1 + accepted], *wrong]
        wanted = count if number == len(plan) - 1 else 2
        at += 1 + accepted
        found = bench.step([run], [tokens[at]], [wanted], [rejected])
    assert bench.tokens[0] == tokens[: at + 1]
    return list(found[0])


@pytest.mark.parametrize("name", ["one_layer", "three_layers"])
@given(
    plan=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5),
    native=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_rejected_drafts_leave_no_trace(
    name: str, plan: list[tuple[int, int]], native: bool, request: pytest.FixtureRequest
) -> None:
    """Slots behind a rejected draft are overwritten before they are read."""
    model, _ = request.getfixturevalue(name)
    pool = None
    if native and library.has_native():
        from moestro.backends.cpu.graph import GraphPool

        pool = GraphPool()
    tokens = text(60)
    found = verified(Bench(model, graph_pool=pool), tokens, plan, 4)
    said = 5 + sum(1 + accepted for accepted, _ in plan)
    assert found == chain(model, tokens[: said + 1], 4)


def test_neighbours_change_nothing(three_layers: tuple[CausalLM, Hy3Float64]) -> None:
    """Sequences that want 3, 0, 6 and 1 drafts, one amid its prompt, logits two rows at a time."""
    model, _ = three_layers
    prompts = [text(9, 11), text(14, 12), text(5, 13), text(21, 14), text(8, 15)]
    wanted = [3, 0, 6, 0, 1]
    bench = Bench(model, len(prompts), max_logits_rows=2)
    bench.tokens = [list(p) for p in prompts]
    runs = [p[:-1] for p in prompts]
    runs[3] = prompts[3][:10]
    behind = [p[-1] for p in prompts]
    first = bench.step(runs, [*behind[:3], None, behind[4]], wanted)
    assert [len(d) for d in first] == wanted
    second = bench.step([[], [], [], prompts[3][10:-1], []], behind, [0, 0, 0, 4, 0])
    alone = [chain(model, prompt, 6) for prompt in prompts]
    for found, count, expected in zip(first, wanted, alone, strict=True):
        assert list(found) == expected[:count]
    assert list(second[3]) == alone[3][:4]


def test_drafting_stops_where_the_pages_end(one_layer: tuple[CausalLM, Hy3Float64]) -> None:
    model, _ = one_layer
    tokens = text(23)
    bench = Bench(model, max_len=24)
    bench.tokens[0] = tokens
    found = bench.step([tokens[:-1]], [tokens[-1]], [9])
    # slots 21, 22 and 23 are left of 24
    assert list(found[0]) == chain(model, tokens, 3)
    full = Bench(model, max_len=20)
    full.tokens[0] = tokens[:21]
    assert len(full.step([tokens[:20]], [tokens[20]], [9])[0]) == 1


def test_logits_that_are_not_finite_draft_nothing(tmp_path: Path) -> None:
    model, _ = drawn(mtp_spec(), SEED, tmp_path)
    tokens = text(9)
    model.model.layers[3].final_layernorm.weight.fill_(torch.nan)  # type: ignore[union-attr]
    assert chain(model, tokens, 3) == []


@needs_kernels
@pytest.mark.parametrize("name", ["one_layer", "three_layers"])
def test_captured_steps_have_the_same_bits(name: str, request: pytest.FixtureRequest) -> None:
    from moestro.backends.cpu.graph import GraphPool

    model, _ = request.getfixturevalue(name)
    prompts = [text(9, 21), text(14, 22), text(30, 23)]
    logits = []

    def run(bench: Bench) -> list[list[tuple[int, ...]]]:
        bench.tokens = [list(p) for p in prompts]
        found = [bench.step([p[:-1] for p in prompts], [p[-1] for p in prompts], [3, 3, 5])]
        for number in range(6):
            runs = [[tokens[-1], *drafts[:1]] for tokens, drafts in
                    zip(bench.tokens, found[-1], strict=True)]  # fmt: skip
            behind = [7 * number + s for s in range(3)]
            found.append(bench.step(runs, behind, [3, 2 + number % 2, 1], [0, number % 2, 0]))
        kv = [pages.k.clone() for pages in bench.loop.kv_pages]
        logits.append(kv)
        return found

    captured = Bench(model, 3, graph_pool=GraphPool())
    captured.drafter.warm_up([2, 1])
    warm = captured.drafter.num_graphs
    assert warm == 2 * model.num_mtp_layers
    assert run(captured) == run(Bench(model, 3))
    assert captured.drafter.num_graphs > warm
    for ours, eager in zip(*logits, strict=True):
        same = (ours == eager) | (ours.isnan() & eager.isnan())
        assert bool(same.all())
    captured.drafter.close()
    assert captured.drafter.num_graphs == 0


def test_a_pass_that_only_stores_has_the_bits_of_a_whole_one(
    three_layers: tuple[CausalLM, Hy3Float64],
) -> None:
    model, _ = three_layers
    tokens = text(12)
    bench = Bench(model)
    bench.tokens[0] = tokens
    bench.step([tokens[:-1]], [tokens[-1]], [0])
    loop = Bench(model).loop
    positions, attention = loop.metadata([0], [11])
    hidden = model(torch.tensor(tokens[:-1]), positions, loop.kv_pages, attention)
    for layer in range(3):
        model.mtp_forward(
            hidden, torch.tensor(tokens[1:]), positions, loop.kv_pages, attention, layer
        )
    for ours, whole in zip(bench.loop.kv_pages, loop.kv_pages, strict=True):
        assert torch.equal(ours.k.nan_to_num(), whole.k.nan_to_num())
        assert torch.equal(ours.v, whole.v)
