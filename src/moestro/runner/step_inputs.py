"""StepInputs: the arrays that captured steps read."""

import numpy as np
import torch

from moestro.ops.attention import AttentionMetadata
from moestro.ops.kv_pages import NO_SLOT


class StepInputs:
    """What a step reads and the next one overwrites, in place; batches are prefixes.

    ids, positions, slots: [max_num_tokens] int64; seq_lens [max_num_seqs], starts
    [max_num_seqs + 1], table [max_num_seqs, M] int32. table_of, widths: what the table's rows and
    starts were last filled for; whoever writes to either says so there.
    """

    def __init__(self, max_num_seqs: int, max_num_tokens: int, page_table_width: int) -> None:
        self.ids = np.zeros(max_num_tokens, np.int64)
        self.positions = np.zeros(max_num_tokens, np.int64)
        self.slots = np.full(max_num_tokens, NO_SLOT, np.int64)
        self.seq_lens = np.ones(max_num_seqs, np.int32)
        self.starts = np.arange(max_num_seqs + 1, dtype=np.int32)
        self.table = np.zeros((max_num_seqs, page_table_width), np.int32)
        self.table_of: object = None
        self.widths: object = None

    @property
    def num_bytes(self) -> int:
        return sum(a.nbytes for a in vars(self).values() if isinstance(a, np.ndarray))

    def fill_blank(self, seqs: int, width: int) -> None:
        """Sequences of `width` equal tokens that store nothing and read page 0."""
        tokens = seqs * width
        self.ids[:tokens], self.positions[:tokens], self.slots[:tokens] = 0, 0, NO_SLOT
        self.seq_lens[:seqs] = width
        self.starts[: seqs + 1] = np.arange(0, tokens + 1, width)
        self.table[:seqs], self.table_of, self.widths = 0, None, None

    def tensors(
        self, seqs: int, tokens: int, max_seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        """ids, positions and metadata over the first sequences and tokens.

        max_seq_len is the captured step's own; later ones may be longer, up to the page table's
        width, and share the tokens out otherwise, so that no kernel may be told of maxima.
        """
        ids, positions, slots = (
            torch.from_numpy(array[:tokens]) for array in (self.ids, self.positions, self.slots)
        )
        metadata = AttentionMetadata(
            query_start_loc=torch.from_numpy(self.starts[: seqs + 1]),
            seq_lens=torch.from_numpy(self.seq_lens[:seqs]),
            page_table=torch.from_numpy(self.table[:seqs]),
            slot_mapping=slots,
            max_query_len=tokens - seqs + 1,
            max_seq_len=max_seq_len,
        )
        return ids, positions, metadata
