"""MTP drafts through the runner: those of a chain by itself, and tokens that never change."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.runner.stepping import Cranker, Stream
from tests.speculative.drafting import VOCAB, chain, drawn, mtp_spec, text

from moestro.backends import load_backend
from moestro.backends.cpu import library
from moestro.core.page_moves import Move, MoveKind, PageLoad
from moestro.core.sampling_params import SamplingParams
from moestro.core.step import NewSequence, Schedule, ScheduledSequence
from moestro.models.causal_lm import CausalLM
from moestro.runner.host_pool import HostPool
from moestro.runner.kv_pool import KVPool
from moestro.runner.kv_tiers import KVTiers
from moestro.runner.model_runner import ModelRunner
from moestro.runner.page_loader import PageLoader
from moestro.runner.transfer import PageTransfer, TransferLimits
from moestro.speculative.mtp import MTPDrafter

PAGES, PAGE_SIZE = 64, 4
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
WARM = SamplingParams(temperature=1.0, logprobs=2, repetition_penalty=1.2)
GRAPHS = [False, *([True] if library.has_native() else [])]


@pytest.fixture(scope="module", params=[1, 2])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """With one MTP layer, and with two."""
    folder = tmp_path_factory.mktemp("model")
    made, _ = drawn(mtp_spec(request.param), 5, folder, torch.bfloat16)
    return made


class Rig:
    """A runner that drafts, with a host tier of 16 slots."""

    def __init__(self, model: CausalLM, graphs: bool) -> None:
        layers = model.spec.num_hidden_layers + model.num_mtp_layers
        self.pool = KVPool(model.spec, PAGES, PAGE_SIZE, torch.bfloat16, layers)
        self.host = HostPool(self.pool, 16)
        self.transfer = PageTransfer(self.host, TransferLimits())
        pool = load_backend("cpu").graph_pool() if graphs else None
        drafter = MTPDrafter(
            model,
            self.pool.layers,
            max_num_seqs=4,
            page_table_width=96 // PAGE_SIZE + 1,
            max_logits_rows=4,
            graph_pool=None if pool is None else pool.apart(),
        )
        self.runner = ModelRunner(
            model,
            self.pool,
            max_num_seqs=4,
            max_model_len=96,
            graph_pool=pool,
            tiers=KVTiers(PageLoader(self.pool.layers, self.host), self.transfer),
            drafter=drafter,
        )
        self.runner.warm_up(num_drafts=3)


@pytest.fixture(params=GRAPHS, ids=lambda graphs: "graphs" if graphs else "eager")
def rig(request: pytest.FixtureRequest, model: CausalLM) -> Iterator[Rig]:
    made = Rig(model, request.param)
    yield made
    made.runner.close()


def test_drafts_are_those_of_a_chain_and_change_no_token(rig: Rig, model: CausalLM) -> None:
    """Chunks, verify rows, plans made ahead and other widths, greedy and sampled."""

    def run(drafting: bool) -> list[Stream]:
        rng = np.random.default_rng(1)
        cranker = Cranker(rig.runner, PAGES, PAGE_SIZE)
        streams = [
            cranker.add(i, Stream(tuple(text(6 + 5 * i, i)), (GREEDY, WARM)[i % 2], seed=i))
            for i in range(4)
        ]
        for round_ in range(40):
            live = [i for i in range(4) if len(streams[i].output) < 14 and i <= round_]
            if not live:
                break
            drafts = {}
            if drafting:
                drafts = {i: (int(rng.integers(0, 4)), int(rng.integers(0, 5))) for i in live}
            cranker.step([(i, 5) for i in live], drafts=drafts, ahead=round_ % 2 == 0)
            for i in live:
                if round_ % 4 == 0 and streams[i].drafts:
                    known = streams[i].token_ids
                    alone = chain(model, known, len(streams[i].drafts), page_size=PAGE_SIZE)
                    assert list(streams[i].drafts) == alone
        for i in range(4):
            cranker.release(i)
        rig.runner.execute(Schedule(0, (), (), (0, 1, 2, 3)))
        return streams

    plain, drafted = run(False), run(True)
    for ours, theirs in zip(plain, drafted, strict=True):
        assert min(len(ours.output), len(theirs.output)) >= 14
        count = min(len(ours.output), len(theirs.output))
        assert ours.output[:count] == theirs.output[:count]
        assert ours.logprobs[:count] == theirs.logprobs[:count]


@pytest.mark.parametrize("chunk", [99, 3])
def test_pages_from_the_host_draft_as_computed_ones(rig: Rig, model: CausalLM, chunk: int) -> None:
    prompt = tuple(text(23, 9))
    cranker = Cranker(rig.runner, PAGES, PAGE_SIZE)
    stream = cranker.add(0, Stream(prompt, GREEDY))
    cranker.step([(0, 99)], drafts={0: (0, 4)})
    said, drafts = stream.output, stream.drafts
    assert list(drafts) == chain(model, [*prompt, *said], 4, page_size=PAGE_SIZE)
    pages = tuple(stream.pages[:5])
    rig.transfer.submit(Move(0, MoveKind.SAVE, pages=pages, slots=tuple(range(5)), urgent=True))
    rig.transfer.wait(30.0)
    assert rig.transfer.poll()[0].num_done == 5
    cranker.release(0)
    for layer in rig.pool.layers:
        layer.k.fill_(torch.nan)
    given = tuple(range(40, 50))
    new = NewSequence(7, prompt, len(prompt), GREEDY, 0, 0, frozenset())
    begin = 5 * PAGE_SIZE
    while begin < len(prompt):
        count = min(chunk, len(prompt) - begin)
        first, last = begin == 5 * PAGE_SIZE, begin + count == len(prompt)
        item = ScheduledSequence(
            7, begin, count, given if first else (), last, num_next_drafts=4 * last
        )
        load = PageLoad(tuple(range(5)), given[:5])
        out = rig.runner.execute(
            Schedule(
                9, (item,), (new,) if first else (), (0,) if first else (), (load,) if first else ()
            )
        )
        begin += count
    assert out.sequences[0].token_ids == tuple(said)
    assert out.sequences[0].draft_token_ids == drafts
    assert max(drafts) < VOCAB


def test_experts_of_the_layer_are_counted_by_what_runs_it(rig: Rig, model: CausalLM) -> None:
    """A row that only keeps its keys and values chooses no expert."""
    rig.runner.execute(Schedule(0, ()))
    cranker = Cranker(rig.runner, PAGES, PAGE_SIZE)
    cranker.add(0, Stream(tuple(text(9)), GREEDY))
    cranker.step([(0, 99)], drafts={0: (0, 3)})
    counted = rig.runner.execute(Schedule(0, ())).expert_tokens
    assert counted is not None
    each = {layer: sum(counts) for layer, counts in counted.rows()}
    assert model.spec.moe is not None
    top_k = model.spec.moe.num_experts_per_tok
    trunk = model.spec.num_hidden_layers
    assert each[trunk - 1] == 9 * top_k
    assert sum(each[layer] for layer in each if layer >= trunk) == 3 * top_k
