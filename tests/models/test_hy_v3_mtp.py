"""The MTP layer of Hy3, on random weights, against its definition in float64."""

import pytest
import torch
from tests.fakes.parameters import tensors_of
from tests.models.mtp_reference import mtp_step
from tests.oracle.configs import hy_v3
from tests.oracle.driver import PagedLoop, drawn_model

from moestro.backends import load_backend
from moestro.backends.cpu import library
from moestro.core.model_config import parse_model_config
from moestro.core.model_spec import ModelSpec
from moestro.errors import UnsupportedError
from moestro.layers.moe import pack_routers
from moestro.layers.parameters import Parameters
from moestro.models.causal_lm import CausalLM
from moestro.models.registry import build_model

LENGTH = 21
SEED = 5


def _spec(num_mtp_layers: int = 1) -> ModelSpec:
    return parse_model_config(hy_v3(num_nextn_predict_layers=num_mtp_layers, vocab_size=200))


def _tokens(count: int) -> torch.Tensor:
    return torch.randint(0, 200, (count,), generator=torch.Generator().manual_seed(3))


def _hidden(count: int) -> torch.Tensor:
    return torch.randn((count, 64), generator=torch.Generator().manual_seed(4))


def _run(
    model: CausalLM, hidden: torch.Tensor, next_ids: torch.Tensor, cuts: list[int], step: int = 0
) -> torch.Tensor:
    """mtp_forward over the positions, in chunks that end at `cuts`."""
    loop = PagedLoop(model, 1, len(hidden), page_size=4)
    out = []
    for start, end in zip([0, *cuts], cuts, strict=False):
        positions, attn = loop.metadata([start], [end - start])
        run = slice(start, end)
        out.append(
            model.mtp_forward(hidden[run], next_ids[run], positions, loop.kv_pages, attn, step)
        )
    return torch.cat(out)


def test_step_equals_its_definition() -> None:
    spec = _spec()
    model = drawn_model(spec, SEED, torch.float32)
    hidden, next_ids = _hidden(LENGTH), _tokens(LENGTH)
    expected = mtp_step(tensors_of(model.weights), spec, 3, hidden, next_ids)
    m = _run(model, hidden, next_ids, [LENGTH])
    torch.testing.assert_close(m.double(), expected, rtol=0, atol=2e-5)
    logits = expected @ model.lm_head.codes.double().T
    torch.testing.assert_close(model.compute_logits(m).double(), logits, rtol=0, atol=1e-4)


def test_chunks_and_decode_steps_give_the_same() -> None:
    model = drawn_model(_spec(), SEED, torch.float32)
    hidden, next_ids = _hidden(LENGTH), _tokens(LENGTH)
    whole = _run(model, hidden, next_ids, [LENGTH])
    for cuts in ([5, 6, LENGTH], [*range(1, LENGTH + 1)]):
        torch.testing.assert_close(_run(model, hidden, next_ids, cuts), whole, rtol=0, atol=1e-5)


def test_chained_steps_feed_their_own_output() -> None:
    spec = _spec()
    model = drawn_model(spec, SEED, torch.float32)
    weights = tensors_of(model.weights)
    hidden, ids = _hidden(LENGTH), _tokens(LENGTH + 1)
    first = _run(model, hidden, ids[:-1], [LENGTH])
    second = _run(model, first, ids[1:], [LENGTH])
    expected = mtp_step(weights, spec, 3, hidden, ids[:-1])
    expected = mtp_step(weights, spec, 3, expected, ids[1:])
    torch.testing.assert_close(second.double(), expected, rtol=0, atol=5e-5)


def test_embedding_counts_everywhere_but_at_position_0() -> None:
    model = drawn_model(_spec(), SEED, torch.float32)
    hidden, next_ids = _hidden(LENGTH), _tokens(LENGTH)
    before = _run(model, hidden, next_ids, [LENGTH])
    other = next_ids.clone()
    other[0] = (other[0] + 1) % 200
    assert torch.equal(_run(model, hidden, other, [LENGTH]), before)
    other[1] = (other[1] + 1) % 200
    changed = (_run(model, hidden, other, [LENGTH]) != before).any(dim=1)
    assert changed.tolist() == [False] + [True] * (LENGTH - 1)


def test_several_layers_take_turns_and_keep_their_own_pages() -> None:
    spec = _spec(num_mtp_layers=2)
    model = drawn_model(spec, SEED, torch.float32)
    weights = tensors_of(model.weights)
    hidden, next_ids = _hidden(LENGTH), _tokens(LENGTH)
    for step, layer in ((0, 3), (1, 4), (2, 3)):
        expected = mtp_step(weights, spec, layer, hidden, next_ids)
        m = _run(model, hidden, next_ids, [LENGTH], step)
        torch.testing.assert_close(m.double(), expected, rtol=0, atol=2e-5)


@pytest.mark.skipif(not library.has_native(), reason="no kernel library was built here")
def test_torch_computes_nothing_in_a_step() -> None:
    """A capture refuses what torch computes; the replay follows its inputs."""
    from moestro.backends.cpu.graph import GraphPool

    model = drawn_model(_spec(), SEED, torch.float32)
    pack_routers(model, load_backend("cpu"), torch.float32)
    loop = PagedLoop(model, 1, LENGTH, page_size=4)
    positions, attn = loop.metadata([0], [LENGTH])
    hidden, ids = _hidden(LENGTH), _tokens(LENGTH)

    def step() -> torch.Tensor:
        return model.mtp_forward(hidden, ids, positions, loop.kv_pages, attn)

    step()  # the rotary rows are there from here on
    captured = GraphPool().capture(step)
    hidden.copy_(hidden.flip(0))
    ids.copy_(ids.flip(0))
    captured.replay()
    assert torch.equal(captured.result, step())


def test_without_the_layer_a_step_is_refused() -> None:
    model = build_model(_spec(), Parameters(torch.float32), num_mtp_layers=0)
    assert not any(name.startswith("model.layers.3.") for name in model.weights)
    empty = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(UnsupportedError, match="without an MTP layer"):
        model.mtp_forward(torch.zeros(0, 64), empty, empty, [], None)  # type: ignore[arg-type]
