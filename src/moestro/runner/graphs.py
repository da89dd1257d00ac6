"""DecodeGraphs: decode steps captured once per batch size, and replayed without Python."""

import logging
from collections.abc import Callable

import numpy as np
import torch

from moestro.backends.base import CapturedStep, GraphPool
from moestro.errors import UnsupportedError
from moestro.models.causal_lm import CausalLM
from moestro.ops.attention import AttentionMetadata
from moestro.runner.forward_batch import ForwardBatch
from moestro.runner.kv_pool import KVPool

logger = logging.getLogger(__name__)

NO_SLOT = -1
"""Slot of a token whose keys are not stored."""

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

    Inputs lie in arrays that every graph shares and each step fills. A step that can't be captured
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
        self._inputs = _StaticInputs(max_num_seqs, max_num_tokens, page_table_width)
        self._graphs: dict[tuple[int, int], CapturedStep] = {}
        self._max = (max_num_seqs, max_num_tokens)
        self._off = False

    @property
    def num_bytes(self) -> int:
        """Memory of intermediates and inputs."""
        return self._pool.num_bytes + self._inputs.num_bytes

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
        attn = batch.attention
        self._inputs.fill(batch)
        graph = self._graphs.get(key)
        if graph is not None and graph.is_current():
            self._model.prepare_positions(attn.max_seq_len)
            graph.replay()
            result: torch.Tensor = graph.result
            return result
        return self._capture(key, attn.max_seq_len)

    def warm_up(self, told: Told | None = None) -> None:
        """Capture decode steps of capture_sizes, on page 0 and without storing."""
        sizes = capture_sizes(*self._max)
        for done, size in enumerate(sizes):
            if self._off:
                return
            if told is not None:
                told(done, len(sizes))
            self._inputs.fill_blank(size)
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

    def _capture(self, key: tuple[int, int], max_seq_len: int) -> torch.Tensor | None:
        """Run a step of the inputs as they lie, and keep it."""
        stale = self._graphs.pop(key, None)
        if stale is not None:
            stale.close()
        self._model.prepare_positions(max_seq_len)
        seqs, width = key
        ids, positions, attn = self._inputs.tensors(seqs, width, max_seq_len)

        def step() -> torch.Tensor:
            hidden = self._model(ids, positions, self._kv_pool.layers, attn)
            return self._model.compute_logits(hidden)

        try:
            graph = self._pool.capture(step)
        except UnsupportedError as error:
            self.close()
            logger.warning("graphs are off: %s", error)
            return None
        self._graphs[key] = graph
        result: torch.Tensor = graph.result
        return result


class _StaticInputs:
    """What a step reads and the next one overwrites, in place; batches are prefixes."""

    def __init__(self, max_num_seqs: int, max_num_tokens: int, page_table_width: int) -> None:
        self._ids = np.zeros(max_num_tokens, np.int64)
        self._positions = np.zeros(max_num_tokens, np.int64)
        self._slots = np.full(max_num_tokens, NO_SLOT, np.int64)
        self._seq_lens = np.ones(max_num_seqs, np.int32)
        self._starts = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._table = np.zeros((max_num_seqs, page_table_width), np.int32)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in vars(self).values())

    def fill(self, batch: ForwardBatch) -> None:
        attn = batch.attention
        tokens, seqs = len(batch.input_ids), len(attn.seq_lens)
        self._ids[:tokens] = batch.input_ids.numpy()
        self._positions[:tokens] = batch.positions.numpy()
        self._slots[:tokens] = attn.slot_mapping.numpy()
        self._seq_lens[:seqs] = attn.seq_lens.numpy()
        self._starts[: seqs + 1] = attn.query_start_loc.numpy()
        table = attn.page_table.numpy()
        self._table[:seqs, : table.shape[1]] = table

    def fill_blank(self, size: int) -> None:
        """Sequences of one token that stores nothing and reads page 0."""
        self._ids[:size], self._positions[:size], self._slots[:size] = 0, 0, NO_SLOT
        self._seq_lens[:size] = 1
        self._starts[: size + 1] = np.arange(size + 1)
        self._table[:size, 0] = 0

    def tensors(
        self, seqs: int, width: int, max_seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        """ids, positions and metadata over the first sequences, width tokens each.

        max_seq_len is the captured step's own; later ones may be longer, up to the page table's
        width, so that no kernel may be told of it.
        """
        tokens = seqs * width
        ids, positions, slots = (
            torch.from_numpy(array[:tokens]) for array in (self._ids, self._positions, self._slots)
        )
        metadata = AttentionMetadata(
            query_start_loc=torch.from_numpy(self._starts[: seqs + 1]),
            seq_lens=torch.from_numpy(self._seq_lens[:seqs]),
            page_table=torch.from_numpy(self._table[:seqs]),
            slot_mapping=slots,
            max_query_len=width,
            max_seq_len=max_seq_len,
        )
        return ids, positions, metadata
