"""DecodeGraphs: decode steps captured once per batch size, and replayed without Python."""

import logging
from collections.abc import Callable

import torch

from moestro.backends.base import CapturedStep, GraphPool
from moestro.errors import UnsupportedError
from moestro.models.causal_lm import CausalLM
from moestro.runner.forward_batch import ForwardBatch
from moestro.runner.kv_pool import KVPool
from moestro.runner.step_inputs import StepInputs

logger = logging.getLogger(__name__)

Told = Callable[[int, int], None]
"""Called with sizes captured and sizes in all."""


def capture_sizes(max_num_seqs: int, max_num_tokens: int) -> tuple[int, ...]:
    """Batch sizes captured before the first request: powers of two and the largest one, falling.

    Kernels take any number of rows, so no batch is padded; another size is captured when it first
    comes.
    """
    most = min(max_num_seqs, max_num_tokens)
    sizes = {1 << i for i in range(most.bit_length())} | {most}
    return tuple(sorted((s for s in sizes if 0 < s <= most), reverse=True))


class DecodeGraphs:
    """Steps from token ids to logits, by (sequences, tokens of each): all rows are scored.

    `inputs` are arrays that every graph shares and each step fills. A step that can't be captured
    (torch would compute a part of it) turns graphs off with a warning: it would come out wrong.
    """

    def __init__(
        self,
        pool: GraphPool,
        model: CausalLM,
        kv_pool: KVPool,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        page_table_width: int,
    ) -> None:
        self._pool = pool
        self._model = model
        self._kv_pool = kv_pool
        # Captured calls point to the table of rotary rows: it must not move any more.
        model.reserve_positions(page_table_width * kv_pool.page_size)
        self.inputs = StepInputs(max_num_seqs, max_num_tokens, page_table_width)
        self._graphs: dict[tuple[int, int], CapturedStep] = {}
        self._max = (max_num_seqs, max_num_tokens)
        self._off = False

    @property
    def num_bytes(self) -> int:
        """Memory of intermediates and inputs."""
        return self._pool.num_bytes + self.inputs.num_bytes

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def logits(self, batch: ForwardBatch) -> torch.Tensor | None:
        """[T, V] fp32 of a step that scores every row; None when it is no such step.

        Valid until the next call.
        """
        key = self._key(batch)
        if key is None:
            return None
        self.inputs.fill(batch)
        return self._run(key, batch.attention.max_seq_len)

    def takes(self, num_seqs: int) -> bool:
        """Whether a step of so many sequences, one token each, is or can be captured."""
        return not self._off and num_seqs <= min(self._max)

    def decode(self, num_seqs: int, max_seq_len: int) -> torch.Tensor:
        """logits of sequences of one token each that lie in `inputs` already."""
        return self._run((num_seqs, 1), max_seq_len)

    def warm_up(self, told: Told | None = None) -> None:
        """Capture decode steps of capture_sizes, on page 0 and without storing."""
        sizes = capture_sizes(*self._max)
        for done, size in enumerate(sizes):
            if self._off:
                return
            if told is not None:
                told(done, len(sizes))
            self.inputs.fill_blank(size)
            self._capture((size, 1), 1)
        if told is not None:
            told(len(sizes), len(sizes))

    def close(self) -> None:
        """Forget every graph. Idempotent."""
        self._off = True
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()

    def _key(self, batch: ForwardBatch) -> tuple[int, int] | None:
        tokens, seqs = len(batch.input_ids), len(batch.attention.seq_lens)
        width = batch.attention.max_query_len
        whole = tokens == seqs * width == len(batch.logits_indices) and not batch.scored
        if self._off or not whole:
            return None
        return (seqs, width) if seqs <= self._max[0] and tokens <= self._max[1] else None

    def _run(self, key: tuple[int, int], max_seq_len: int) -> torch.Tensor:
        graph = self._graphs.get(key)
        if graph is None or not graph.is_current():
            return self._capture(key, max_seq_len)
        self._model.prepare_positions(max_seq_len)
        graph.replay()
        result: torch.Tensor = graph.result
        return result

    def _capture(self, key: tuple[int, int], max_seq_len: int) -> torch.Tensor:
        """Run a step of the inputs as they lie, and keep it where it can be kept."""
        stale = self._graphs.pop(key, None)
        if stale is not None:
            stale.close()
        self._model.prepare_positions(max_seq_len)
        seqs, width = key
        ids, positions, attn = self.inputs.tensors(seqs, width, max_seq_len)

        def step() -> torch.Tensor:
            hidden = self._model(ids, positions, self._kv_pool.layers, attn)
            return self._model.compute_logits(hidden)

        try:
            graph = self._pool.capture(step)
        except UnsupportedError as error:
            self.close()
            logger.warning("every step runs eagerly from now on: %s", error)
            return step()
        self._graphs[key] = graph
        result: torch.Tensor = graph.result
        return result
