"""DecodeGraphs: decode steps captured once per batch size, and replayed without Python."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moestro.backends.base import GraphPool
from moestro.backends.captured_steps import CapturedSteps
from moestro.models.causal_lm import CausalLM
from moestro.ops.attention import AttentionMetadata
from moestro.runner.kv_pool import KVPool
from moestro.runner.step_inputs import StepInputs

Told = Callable[[int, int], None]
"""Called with sizes captured and sizes in all."""

_MAX_SEQS_OF_EVERY_WIDTH = 1
"""Batches up to this size are captured with every number of drafts, others with none and all."""


@dataclass(frozen=True, slots=True)
class GraphStep:
    """What a captured step computed, and from what; valid until the next one.

    hidden_states: [T, N] after the final norm; logits: [T, V] fp32; positions: [T] int64.
    attention's maxima are those of the step that was captured.
    """

    hidden_states: torch.Tensor
    logits: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata


def capture_sizes(
    max_num_seqs: int, max_num_tokens: int, num_drafts: int = 0
) -> tuple[tuple[int, int], ...]:
    """(sequences, tokens of each) captured before the first request, most tokens first.

    Sequences: powers of two and the largest number. Tokens: one, and one more than the drafts; a
    sequence alone may have fewer drafts too. Kernels take any number of rows, so no batch is
    padded; another size is captured when it first comes.
    """
    most = min(max_num_seqs, max_num_tokens)
    counts = {1 << i for i in range(most.bit_length())} | {most}
    sizes = [
        (seqs, width)
        for seqs in counts
        for width in range(1, num_drafts + 2)
        if 0 < seqs <= most
        and seqs * width <= max_num_tokens
        and (width in (1, num_drafts + 1) or seqs <= _MAX_SEQS_OF_EVERY_WIDTH)
    ]
    return tuple(sorted(sizes, key=lambda size: (-size[0] * size[1], size)))


class DecodeGraphs:
    """Steps from token ids to logits, by (sequences, tokens): all rows are scored.

    How the tokens are shared out among the sequences is data, as lengths are. `inputs` are arrays
    that every graph shares and each step fills. A step that can't be captured turns graphs off.
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
        self._captured = CapturedSteps(pool, "every step runs eagerly")
        self._max = (max_num_seqs, max_num_tokens)

    @property
    def num_bytes(self) -> int:
        """Memory of intermediates and inputs."""
        return self._pool.num_bytes + self.inputs.num_bytes

    @property
    def num_graphs(self) -> int:
        return len(self._captured)

    @property
    def usual_batches(self) -> list[int]:
        """Numbers of sequences that warm_up captures, one token each."""
        return [seqs for seqs, width in capture_sizes(*self._max) if width == 1]

    def takes(self, num_seqs: int, num_tokens: int) -> bool:
        """Whether a step of such a size is or can be captured."""
        fits = num_seqs <= self._max[0] and num_tokens <= self._max[1]
        return fits and self._captured.is_on

    def decode(self, num_seqs: int, num_tokens: int, max_seq_len: int) -> GraphStep:
        """The step that lies in `inputs` already."""
        self._model.prepare_positions(max_seq_len)
        step: GraphStep = self._captured.run(
            (num_seqs, num_tokens), lambda: self._compute(num_seqs, num_tokens, max_seq_len)
        )
        return step

    def warm_up(self, told: Told | None = None, num_drafts: int = 0) -> None:
        """Capture decode steps of capture_sizes, on page 0 and without storing."""
        sizes = capture_sizes(*self._max, num_drafts)
        for done, (seqs, width) in enumerate(sizes):
            if not self._captured.is_on:
                return
            if told is not None:
                told(done, len(sizes))
            self.inputs.fill_blank(seqs, width)
            self.decode(seqs, seqs * width, width)
        if told is not None:
            told(len(sizes), len(sizes))

    def close(self) -> None:
        """Forget every graph. Idempotent."""
        self._captured.close()

    def _compute(self, num_seqs: int, num_tokens: int, max_seq_len: int) -> GraphStep:
        ids, positions, attn = self.inputs.tensors(num_seqs, num_tokens, max_seq_len)
        hidden = self._model(ids, positions, self._kv_pool.layers, attn)
        return GraphStep(hidden, self._model.compute_logits(hidden), positions, attn)
