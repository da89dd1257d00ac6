"""StepInputs: the arrays that captured steps read."""

import numpy as np
import torch

from moestro.ops.attention import AttentionMetadata
from moestro.runner.forward_batch import ForwardBatch

NO_SLOT = -1
"""Slot of a token whose keys are not stored."""


class StepInputs:
    """What a step reads and the next one overwrites, in place; batches are prefixes.

    ids, positions, slots: [max_num_tokens] int64; seq_lens [max_num_seqs], starts
    [max_num_seqs + 1], table [max_num_seqs, M] int32. table_of: what the table's rows were last
    filled for; whoever writes to the table says so there.
    """

    def __init__(self, max_num_seqs: int, max_num_tokens: int, page_table_width: int) -> None:
        self.ids = np.zeros(max_num_tokens, np.int64)
        self.positions = np.zeros(max_num_tokens, np.int64)
        self.slots = np.full(max_num_tokens, NO_SLOT, np.int64)
        self.seq_lens = np.ones(max_num_seqs, np.int32)
        self.starts = np.arange(max_num_seqs + 1, dtype=np.int32)
        self.table = np.zeros((max_num_seqs, page_table_width), np.int32)
        self.table_of: object = None

    @property
    def num_bytes(self) -> int:
        return sum(a.nbytes for a in vars(self).values() if isinstance(a, np.ndarray))

    def fill(self, batch: ForwardBatch) -> None:
        """Copy a batch that was made apart."""
        attn = batch.attention
        tokens, seqs = len(batch.input_ids), len(attn.seq_lens)
        self.ids[:tokens] = batch.input_ids.numpy()
        self.positions[:tokens] = batch.positions.numpy()
        self.slots[:tokens] = attn.slot_mapping.numpy()
        self.seq_lens[:seqs] = attn.seq_lens.numpy()
        self.starts[: seqs + 1] = attn.query_start_loc.numpy()
        table = attn.page_table.numpy()
        self.table_of = None
        self.table[:seqs, : table.shape[1]] = table

    def fill_blank(self, size: int) -> None:
        """Sequences of one token that stores nothing and reads page 0."""
        self.ids[:size], self.positions[:size], self.slots[:size] = 0, 0, NO_SLOT
        self.seq_lens[:size] = 1
        self.starts[: size + 1] = np.arange(size + 1)
        self.table[:size, 0], self.table_of = 0, None

    def tensors(
        self, seqs: int, width: int, max_seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        """ids, positions and metadata over the first sequences, width tokens each.

        max_seq_len is the captured step's own; later ones may be longer, up to the page table's
        width, so that no kernel may be told of it.
        """
        tokens = seqs * width
        ids, positions, slots = (
            torch.from_numpy(array[:tokens]) for array in (self.ids, self.positions, self.slots)
        )
        metadata = AttentionMetadata(
            query_start_loc=torch.from_numpy(self.starts[: seqs + 1]),
            seq_lens=torch.from_numpy(self.seq_lens[:seqs]),
            page_table=torch.from_numpy(self.table[:seqs]),
            slot_mapping=slots,
            max_query_len=width,
            max_seq_len=max_seq_len,
        )
        return ids, positions, metadata
