"""DraftSteps: steps of the MTP layers over arrays in place, captured once per size."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from moestro import ops
from moestro.backends.base import GraphPool
from moestro.backends.captured_steps import CapturedSteps
from moestro.models.causal_lm import CausalLM

Drafted = tuple[torch.Tensor, torch.Tensor]
"""Hidden states [S, N] after the layer's final norm, and the tokens [S] int64 that they draft."""


class DraftSteps:
    """What an MTP step reads and the next one overwrites: batches are prefixes of the arrays.

    hidden: [R, N], the hidden state beside each row's token. ids: [R] int64, the token behind the
    row's position; positions, slots: [R] int64; seq_lens: [R] int32, positions + 1; table: [R, M]
    int32, the row's pages. R = num_rows. Rows are of sequences of their own in `draft`, and of any
    in `store`. A step that can't be captured turns graphs off with a warning, as a step of the
    trunk does: the same bits, slower.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_pages: Sequence[ops.KVPages],
        *,
        num_rows: int,
        page_table_width: int,
        graph_pool: GraphPool | None,
    ) -> None:
        self._model = model
        self._kv_pages = kv_pages
        self._captured = CapturedSteps(graph_pool, "drafts are computed eagerly")
        self._max_positions = page_table_width * kv_pages[0].page_size
        if graph_pool is not None:
            # captured calls point to the table of rotary rows: it must not move any more
            model.reserve_positions(self._max_positions)
        table = model.model.embed_tokens.weight
        self.num_rows = num_rows
        self.hidden = torch.zeros((num_rows, table.shape[1]), dtype=table.dtype)
        self.ids = np.zeros(num_rows, np.int64)
        self.positions = np.zeros(num_rows, np.int64)
        self.slots = np.full(num_rows, ops.NO_SLOT, np.int64)
        self.seq_lens = np.ones(num_rows, np.int32)
        self.table = np.zeros((num_rows, page_table_width), np.int32)
        self._starts = torch.arange(num_rows + 1, dtype=torch.int32)
        self._greedy = _greedy(num_rows)

    @property
    def num_graphs(self) -> int:
        """Captured steps."""
        return len(self._captured)

    def draft(self, size: int, step: int, max_seq_len: int) -> Drafted:
        """Step `step` of the chain for the first `size` rows, one sequence each.

        Every MTP layer keeps its KV of these slots, and the layer whose turn it is drafts. The
        result is valid until the next call. A row whose logits are not finite drafts
        ops.NO_TOKEN.
        """
        layer = step % self._model.num_mtp_layers
        drafted: Drafted = self._run(
            ("draft", size, layer), max_seq_len, lambda: self._draft(size, layer, max_seq_len)
        )
        return drafted

    def store(self, size: int, max_seq_len: int) -> None:
        """KV of the first `size` rows in every MTP layer."""
        self._run(("store", size, 0), max_seq_len, lambda: self._store(size, max_seq_len))

    def warm_up(self, sizes: Sequence[int]) -> None:
        """Capture drafts of these sizes, on page 0 and without storing."""
        self.ids[:], self.positions[:], self.slots[:], self.table[:, 0] = 0, 0, ops.NO_SLOT, 0
        self.seq_lens[:] = 1
        for size in sizes:
            for layer in range(self._model.num_mtp_layers):
                if self._captured.is_on:
                    self.draft(size, layer, 1)

    def close(self) -> None:
        """Forget every graph. Idempotent."""
        self._captured.close()

    def _run(self, key: tuple[str, int, int], max_seq_len: int, compute: Callable[[], Any]) -> Any:
        self._model.prepare_positions(max_seq_len)
        return self._captured.run(key, compute)

    def _draft(self, size: int, layer: int, max_seq_len: int) -> Drafted:
        for other in range(self._model.num_mtp_layers):
            if other != layer:
                self._store_in(size, other, max_seq_len)
        attention = ops.AttentionMetadata(
            query_start_loc=self._starts[: size + 1],
            seq_lens=torch.from_numpy(self.seq_lens[:size]),
            page_table=torch.from_numpy(self.table[:size]),
            slot_mapping=torch.from_numpy(self.slots[:size]),
            max_query_len=1,
            max_seq_len=max_seq_len,
        )
        hidden = self._model.mtp_forward(
            self.hidden[:size],
            torch.from_numpy(self.ids[:size]),
            torch.from_numpy(self.positions[:size]),
            self._kv_pages,
            attention,
            layer,
        )
        batch = ops.SamplingBatch(_first_rows(self._greedy, size))
        drawn = ops.sample(self._model.compute_logits(hidden), batch)
        return hidden, drawn.token_ids

    def _store(self, size: int, max_seq_len: int) -> None:
        for layer in range(self._model.num_mtp_layers):
            self._store_in(size, layer, max_seq_len)

    def _store_in(self, size: int, layer: int, max_seq_len: int) -> None:
        self._model.mtp_store(
            self.hidden[:size],
            torch.from_numpy(self.ids[:size]),
            torch.from_numpy(self.positions[:size]),
            self._kv_pages,
            torch.from_numpy(self.slots[:size]),
            max_seq_len,
            layer,
        )


def _greedy(rows: int) -> ops.SamplingMetadata:
    doubles, integers = torch.zeros(rows, dtype=torch.float64), torch.zeros(rows, dtype=torch.int64)
    return ops.SamplingMetadata(
        temperature=doubles,
        top_k=integers,
        top_p=torch.ones(rows, dtype=torch.float64),
        min_p=doubles,
        seed=integers,
        sample_index=integers,
        position=integers,
    )


def _first_rows(m: ops.SamplingMetadata, rows: int) -> ops.SamplingMetadata:
    return ops.SamplingMetadata(
        temperature=m.temperature[:rows],
        top_k=m.top_k[:rows],
        top_p=m.top_p[:rows],
        min_p=m.min_p[:rows],
        seed=m.seed[:rows],
        sample_index=m.sample_index[:rows],
        position=m.position[:rows],
    )
