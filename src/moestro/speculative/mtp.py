"""MTPDrafter: the checkpoint's multi-token-prediction layers say what may come next.

Slot i of a sequence stands for its token i + 1 and lies at position i. Every MTP layer keeps the KV
of slot i computed from

    (the trunk's hidden state at position i after its final norm, token i + 1)

once both are known, whatever layer it is and whichever step of a chain will read it. Drafting goes
on from the last known token t, at position p + 1:

    step 0     slot p        (the trunk's hidden state at p, t)           drafts token p + 2
    step s     slot p + s    (what step s - 1 returned, its own draft)    drafts token p + 2 + s

Step s uses layer s modulo the number of layers; the others keep their KV of its slot all the same,
so that no layer ever attends to a slot that holds other tokens. What the later steps left in the
slots behind p is overwritten once the trunk has computed these positions, before it is read. So
the KV of a slot depends on one position's hidden state and one token: nothing has to be carried
over the border of a chunk, or is missing behind a page that came from a cache.

Source: the released checkpoint's layout, Tencent's trainer, and vLLM's order of layers.
"""

from collections.abc import Sequence

import numpy as np
import torch

from moestro import ops
from moestro.backends.base import GraphPool
from moestro.models.causal_lm import CausalLM
from moestro.speculative.draft_steps import DraftSteps
from moestro.speculative.drafter import ComputedStep, DraftedSequence


class MTPDrafter:
    """A Drafter that reads the trunk's hidden states and writes to the MTP layers' own pages.

    Every step must be shown to it, once the pages that the step loads are in place. Slots are
    primed in the step that computes them: rows that draft by their first draft step, all others
    by mtp_store, which stops at the keys and values; rows behind a rejected draft are left out,
    as no token of the sequence is behind them. kv_pages: of all layers, those of the MTP layers
    last. Draft tokens are the most likely ones, the lowest id of equals; no penalty, mask or
    temperature counts, and none has to: drafts never change what is said, only how much of it a
    step can say. Draft steps are captured where there is a graph pool.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_pages: Sequence[ops.KVPages],
        *,
        max_num_seqs: int,
        page_table_width: int,
        max_logits_rows: int,
        graph_pool: GraphPool | None = None,
    ) -> None:
        """max_logits_rows: most rows of logits at a time; more sequences draft in turns."""
        self._model = model
        self._kv_pages = kv_pages
        self._page_size = kv_pages[0].page_size
        self._steps = DraftSteps(
            model,
            kv_pages,
            num_rows=max(1, min(max_num_seqs, max_logits_rows)),
            page_table_width=page_table_width,
            graph_pool=graph_pool,
        )

    @property
    def reads_hidden_states(self) -> bool:
        return True

    @property
    def num_graphs(self) -> int:
        """Captured steps."""
        return self._steps.num_graphs

    @torch.inference_mode()
    def warm_up(self, sizes: Sequence[int]) -> None:
        """Capture drafts of these numbers of sequences."""
        self._steps.warm_up([size for size in sizes if size <= self._steps.num_rows])

    @torch.inference_mode()
    def propose(self, step: ComputedStep) -> list[tuple[int, ...]]:
        """See Drafter. Less than wanted where a sequence's pages end, or logits are not finite."""
        counts = [self._room(sequence) for sequence in step.sequences]
        self._prime(step, counts)
        drafts: list[list[int]] = [[] for _ in counts]
        order = sorted((i for i, n in enumerate(counts) if n), key=lambda i: -counts[i])
        for begin in range(0, len(order), self._steps.num_rows):
            at = order[begin : begin + self._steps.num_rows]
            self._chain(step, at, [counts[i] for i in at], [drafts[i] for i in at])
        return [tuple(found) for found in drafts]

    def release(self, seq_ids: Sequence[int]) -> None:
        """All that it knows of a sequence lies in pages."""

    def close(self) -> None:
        """Forget what was captured. Idempotent."""
        self._steps.close()

    def _room(self, sequence: DraftedSequence) -> int:
        """Drafts whose slots have pages."""
        slot = len(sequence.token_ids) - 2
        room = len(sequence.page_table) * self._page_size - slot
        return max(0, min(sequence.num_wanted, room))

    def _prime(self, step: ComputedStep, counts: Sequence[int]) -> None:
        """Keep the KV of every row that is not about to draft and has a token behind it."""
        total = len(step.positions)
        kept = np.ones(total, bool)
        bounds = step.attention.query_start_loc.numpy()
        rows = np.array([sequence.row for sequence in step.sequences], np.int64)
        ends = bounds[np.searchsorted(bounds, rows, side="right")]
        for row, end, count in zip(rows.tolist(), ends.tolist(), counts, strict=True):
            kept[row + (count == 0) : end] = False
        chosen = np.flatnonzero(kept)
        if not len(chosen):
            return
        longest = step.attention.max_seq_len
        slots = step.attention.slot_mapping.numpy()
        ids = np.maximum(step.next_token_ids.numpy(), 0)  # nothing is said behind a failed row
        if len(chosen) <= self._steps.num_rows:
            steps, size = self._steps, len(chosen)
            self._take_hidden(step.hidden_states, chosen)
            steps.ids[:size] = ids[chosen]
            steps.positions[:size] = step.positions.numpy()[chosen]
            steps.slots[:size] = slots[chosen]
            steps.store(size, longest)
            return
        hidden, positions = step.hidden_states, step.positions
        if len(chosen) < total:
            index = torch.from_numpy(chosen)
            hidden, positions = ops.embedding(index, hidden), positions[index]
            ids, slots = ids[chosen], slots[chosen]
        given = torch.from_numpy(ids), positions, self._kv_pages, torch.from_numpy(slots), longest
        for layer in range(self._model.num_mtp_layers):
            self._model.mtp_store(hidden, *given, layer)

    def _chain(
        self,
        step: ComputedStep,
        at: Sequence[int],
        counts: Sequence[int],
        drafts: Sequence[list[int]],
    ) -> None:
        """Draft for step.sequences[at], which want `counts`, falling; fills `drafts`."""
        sequences = [step.sequences[i] for i in at]
        steps, size = self._steps, len(at)
        self._take_hidden(step.hidden_states, np.array([s.row for s in sequences], np.int64))
        steps.ids[:size] = [s.token_ids[-1] for s in sequences]
        steps.positions[:size] = [len(s.token_ids) - 2 for s in sequences]
        for row, sequence in enumerate(sequences):
            last = len(sequence.token_ids) - 2 + counts[row] - 1
            used = last // self._page_size + 1
            steps.table[row, :used] = sequence.page_table[:used]
        for number in range(counts[0]):
            while counts[size - 1] <= number:
                size -= 1
            self._place(size)
            hidden, token_ids = steps.draft(size, number, int(steps.seq_lens[:size].max()))
            found = token_ids.tolist()
            for row, token_id in enumerate(found):
                # behind a draft that failed nothing follows
                if token_id >= 0 and len(drafts[row]) == number:
                    drafts[row].append(token_id)
            steps.hidden[:size].copy_(hidden)
            np.maximum(found, 0, out=steps.ids[:size])
            steps.positions[:size] += 1

    def _place(self, size: int) -> None:
        """Slots and lengths of the first rows from their positions and pages."""
        steps = self._steps
        page, offset = np.divmod(steps.positions[:size], self._page_size)
        pages = np.take_along_axis(steps.table[:size], page[:, None], axis=1)[:, 0]
        steps.slots[:size] = pages * np.int64(self._page_size) + offset
        steps.seq_lens[:size] = steps.positions[:size] + 1

    def _take_hidden(self, hidden_states: torch.Tensor, rows: np.ndarray) -> None:
        """The hidden states of some rows, in place."""
        index = torch.from_numpy(rows)
        torch.index_select(hidden_states, 0, index, out=self._steps.hidden[: len(rows)])
