"""Schedules with loads: the bits of steps that computed all, layer by layer, ahead of use."""

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from tests.runner.stepping import Cranker, Stream
from tests.runner.test_graphs import make_model
from tests.runner.test_model_runner import HY3, PAGE_SIZE, PAGES, QWEN, VOCAB

from moestro.backends import load_backend
from moestro.backends.cpu import library
from moestro.core.model_spec import ModelSpec
from moestro.core.page_moves import Move, MoveKind, PageLoad
from moestro.core.sampling_params import SamplingParams
from moestro.core.step import NewSequence, Schedule, ScheduledSequence, SequenceOutput
from moestro.runner.host_pool import HostPool
from moestro.runner.kv_pool import KVPool
from moestro.runner.kv_tiers import KVTiers
from moestro.runner.model_runner import ModelRunner
from moestro.runner.page_loader import LayersInLoading, PageLoader
from moestro.runner.transfer import PageTransfer, TransferLimits

pytestmark = pytest.mark.skipif(not library.has_native(), reason="no kernel library was built here")

PARAMS = SamplingParams(temperature=0.0, logprobs=3)
PROMPT = tuple(torch.randint(0, VOCAB, (45,), generator=torch.Generator().manual_seed(3)).tolist())
NUM_SLOTS = 12
STEPS = 3
CASES = [
    (spec, kv_dtype, graphs)
    for spec in (QWEN, HY3)
    for kv_dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn)
    for graphs in (True, False)
]


class Rig:
    """A runner with a host tier, some of whose slots hold the pages of PROMPT."""

    def __init__(self, spec: ModelSpec, kv_dtype: torch.dtype, graphs: bool) -> None:
        self.pool = KVPool(spec, PAGES, PAGE_SIZE, kv_dtype)
        self.host = HostPool(self.pool, NUM_SLOTS)
        self.transfer = PageTransfer(self.host, TransferLimits())
        self.runner = ModelRunner(
            make_model(spec, torch.bfloat16),
            self.pool,
            max_num_seqs=8,
            max_model_len=96,
            graph_pool=load_backend("cpu").graph_pool() if graphs else None,
            tiers=KVTiers(PageLoader(self.pool.layers, self.host), self.transfer),
        )
        self._seq_ids = iter(range(1000, 2000))

    def compute(self) -> list[SequenceOutput]:
        """All of PROMPT and STEPS tokens after it, the prompt's full pages kept in slots 0, ..."""
        cranker = Cranker(self.runner, PAGES, PAGE_SIZE)
        stream = cranker.add(0, Stream(PROMPT, PARAMS))
        outputs = [cranker.step([(0, 99)])[0]]
        pages = tuple(stream.pages[: len(PROMPT) // PAGE_SIZE])
        self.transfer.submit(
            Move(0, MoveKind.SAVE, pages=pages, slots=tuple(range(len(pages))), urgent=True)
        )
        self.transfer.wait(30.0)
        assert self.transfer.poll()[0].num_done == len(pages)
        outputs += [cranker.step([(0, 1)])[0] for _ in range(STEPS)]
        cranker.release(0)
        self.runner.execute(Schedule(0, (), (), (0,)))
        return [as_of(o) for o in outputs]

    def load(self, num_pages: int, chunk: int = 99) -> list[SequenceOutput]:
        """The same with the first pages loaded into pages full of NaN."""
        for pages in self.pool.layers:
            for part in (pages.k, pages.v, pages.k_scales, pages.v_scales):
                if part is not None:
                    part.view(torch.uint8).fill_(0x7F)
        seq_id = next(self._seq_ids)
        pages = tuple(range(PAGES - 1, PAGES - 17, -1))
        new = NewSequence(seq_id, PROMPT, len(PROMPT), PARAMS, 0, 0, frozenset())
        outputs, begin = [], num_pages * PAGE_SIZE
        known = len(PROMPT)
        while len(outputs) < STEPS + 1:
            first = begin == num_pages * PAGE_SIZE
            end = min(begin + chunk, known)
            item = ScheduledSequence(
                seq_id, begin, end - begin, pages if first else (), end == known
            )
            load = PageLoad(tuple(range(num_pages)), pages[:num_pages])
            done = self.runner.execute(
                Schedule(1, (item,), (new,) if first else (), (), (load,) if first else ())
            )
            assert done.load_bytes == (num_pages * self.host.page_bytes if first else 0)
            assert (done.load_s > 0) == first
            if end == known:
                outputs.append(as_of(done.sequences[0]))
                known += 1
            begin = end
        self.runner.execute(Schedule(2, (), (), (seq_id,)))
        return outputs


def as_of(output: SequenceOutput) -> SequenceOutput:
    """Without the sequence's number."""
    assert output.error is None
    return SequenceOutput(0, output.token_ids, output.logprobs)


@pytest.fixture(params=CASES, ids=lambda c: f"{c[0].model_type}-{str(c[1])[6:]}-{c[2]}")
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(*request.param)
    yield made
    made.runner.close()


def test_loaded_pages_give_what_computed_ones_give(rig: Rig):
    with torch.inference_mode():
        wanted = rig.compute()
        full_pages = len(PROMPT) // PAGE_SIZE
        for num_pages in range(1, full_pages + 1):
            assert rig.load(num_pages) == wanted, num_pages
        assert rig.load(2, chunk=5) == wanted
        # all but one token: the step is a decode step
        assert len(PROMPT) - full_pages * PAGE_SIZE == 1


def test_loads_without_tiers_contradict_what_was_built():
    spec = QWEN
    runner = ModelRunner(
        make_model(spec, torch.bfloat16),
        KVPool(spec, PAGES, PAGE_SIZE, torch.bfloat16),
        max_num_seqs=8,
        max_model_len=96,
    )
    with pytest.raises(ValueError, match="no host tier"):
        runner.execute(Schedule(0, (), loads=(PageLoad((0,), (0,)),)))
    runner.close()


def test_a_step_of_loads_alone_has_them_in_place():
    rig = Rig(QWEN, torch.bfloat16, False)
    rig.host.fill(3, b"\x3f" * rig.host.page_bytes)
    output = rig.runner.execute(Schedule(9, (), loads=(PageLoad((3,), (5,)),)))
    assert output.load_bytes == rig.host.page_bytes
    for pages in rig.pool.layers:
        assert bool((pages.k[5].view(torch.uint8) == 0x3F).all())
    rig.runner.close()


class GatedHost(HostPool):
    """Loads a layer once the one before it has been used."""

    def gate(self) -> None:
        self.used = [threading.Event() for _ in range(self.layout.num_layers)]
        self.loaded: list[int] = []
        self.fails_at: int | None = None

    def load(self, layer: int, slots: Sequence[int], pages: Sequence[int]) -> None:
        if layer:
            assert self.used[layer - 1].wait(30.0), "layers are not computed while others load"
        if layer == self.fails_at:
            raise OSError("no such slot")
        super().load(layer, slots, pages)
        self.loaded.append(layer)


def gated() -> tuple[GatedHost, PageLoader]:
    pool = KVPool(QWEN, 4, PAGE_SIZE, torch.bfloat16)
    host = GatedHost(pool, 4)
    host.gate()
    host.fill(0, b"\x11" * host.page_bytes)
    return host, PageLoader(pool.layers, host)


def test_a_layer_is_handed_out_before_the_next_is_loaded():
    host, loader = gated()
    layers = loader.start([PageLoad((0,), (2,))])
    assert len(layers) == host.layout.num_layers > 1
    for i in range(len(layers)):
        pages = layers[i]
        assert host.loaded == list(range(i + 1))
        assert bool((pages.k[2].view(torch.uint8) == 0x11).all())
        host.used[i].set()
    assert layers[-1] is layers[0:][-1]
    with pytest.raises(IndexError):
        layers[len(layers)]
    loader.close()
    loader.close()


def test_a_failed_load_is_raised_where_its_layer_is_needed(caplog: pytest.LogCaptureFixture):
    host, loader = gated()
    host.fails_at = 1
    layers = loader.start([PageLoad((0,), (2,))])
    assert isinstance(layers, LayersInLoading)
    layers[0]
    host.used[0].set()
    with pytest.raises(RuntimeError, match="no such slot"):
        layers[1]
    with pytest.raises(RuntimeError, match="no such slot"):
        layers.wait()
    assert "loading KV pages" in caplog.text
    loader.close()
