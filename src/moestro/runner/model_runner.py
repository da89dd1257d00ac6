"""ModelRunner: executes schedules on one model and its KV pool."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from moestro import ops
from moestro.backends.base import GraphPool
from moestro.core.plan import LOGITS_BLOCK_BYTES, logits_rows
from moestro.core.speculative_config import MAX_DRAFT_TOKENS
from moestro.core.step import Schedule, SequenceOutput, StepOutput, TokenLogprobs
from moestro.models.causal_lm import CausalLM
from moestro.runner.drafting import Drafting, StepRows
from moestro.runner.expert_counter import ExpertCounter
from moestro.runner.forward_batch import ForwardBatch, ScoredRun
from moestro.runner.graphs import DecodeGraphs, Told
from moestro.runner.inputs import InputBuilder
from moestro.runner.kv_pool import KVPool
from moestro.runner.kv_tiers import KVTiers
from moestro.runner.page_loader import LayersInLoading
from moestro.runner.sampler import Sampler, score_prompt
from moestro.runner.sequence_state import SequenceState
from moestro.speculative.drafter import Drafter


class ModelRunner:
    """The Runner that computes. It obeys the schedule and decides nothing.

    Owns the KV pool and the state of every sequence between its first schedule and its release.
    Row i of a batch has the same bits whatever the other rows are, as far as the ops keep theirs.
    tiers: what moves pages to and from this pool, closed with it; schedules may then hold loads.
    drafter: proposes what later schedules have verified; without one nothing is drafted.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_pool: KVPool,
        *,
        max_num_seqs: int,
        max_model_len: int,
        logits_block_bytes: int = LOGITS_BLOCK_BYTES,
        graph_pool: GraphPool | None = None,
        tiers: KVTiers | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self._model = model
        self._tiers = tiers
        self._kv_pool = kv_pool
        self._inputs = InputBuilder(max_num_seqs, max_model_len, kv_pool.page_size)
        self._max_model_len = max_model_len
        self._drafting = None if drafter is None else Drafting(drafter, self._inputs)
        self._experts = ExpertCounter(model)
        self._sampler = Sampler(None if graph_pool is None else graph_pool.apart())
        self._logits_rows = logits_rows(model.spec.vocab_size, logits_block_bytes)
        self._graphs: DecodeGraphs | None = None
        if graph_pool is not None:
            most = max_num_seqs if drafter is None else max_num_seqs * (1 + MAX_DRAFT_TOKENS)
            self._graphs = DecodeGraphs(
                graph_pool,
                model,
                kv_pool,
                max_num_seqs=max_num_seqs,
                max_num_tokens=min(most, self._logits_rows),
                page_table_width=self._inputs.page_table_width,
            )

    @torch.inference_mode()
    def warm_up(self, told: Told | None = None, num_drafts: int = 0) -> None:
        """Capture the usual decode steps, with up to so many drafts of a sequence.

        told: sizes captured, and in all.
        """
        if self._graphs is not None:
            self._graphs.warm_up(told, min(num_drafts, self._max_model_len - 1))
            if self._drafting is not None:
                self._drafting.warm_up(self._graphs.usual_batches)
            self._experts.take()  # blank tokens chose experts too

    @property
    def num_graphs(self) -> int:
        """Captured decode steps."""
        return 0 if self._graphs is None else self._graphs.num_graphs

    @property
    def graph_summary(self) -> str:
        """What was captured, for the log."""
        if self._graphs is None:
            return "none, every step runs eagerly"
        return f"{self._graphs.num_graphs} batch sizes, {self._graphs.num_bytes:,} bytes"

    def execute(self, schedule: Schedule) -> StepOutput:
        """Run one step. Raises ValueError for a schedule that contradicts what came before."""
        began_s = time.monotonic()
        output = self._execute(schedule)
        return replace(output, began_s=began_s, ended_s=time.monotonic())

    @torch.inference_mode()
    def _execute(self, schedule: Schedule) -> StepOutput:
        self._inputs.admit(schedule)
        drafting = self._drafting
        if schedule.released:
            self._sampler.release()
            if drafting is not None:
                drafting.release(schedule.released)
        loading = self._load(schedule)
        if not schedule.sequences:
            counted = self._experts.take()
            return _with_loads(StepOutput(schedule.step_id, (), counted), loading)
        states = self._inputs.states(schedule)
        outputs = [SequenceOutput(state.seq_id) for state in states]
        rows = self._decode(schedule, states, loading, outputs)
        if rows is None:
            rows = self._compute(schedule, states, loading, outputs)
        for item, state, output in zip(schedule.sequences, states, outputs, strict=True):
            said = output.token_ids
            for token_id in said:
                state.append(token_id)
            if item.samples:
                state.end_run(1 + item.num_draft_tokens, len(said))
        if drafting is not None and drafting.asked_by(schedule):
            drafting.propose(schedule, states, outputs, rows)
        counted = self._experts.due(schedule.num_tokens)
        return _with_loads(StepOutput(schedule.step_id, tuple(outputs), counted), loading)

    def close(self) -> None:
        """Give the KV memory back. The runner is of no use afterwards."""
        self._sampler.release()
        if self._graphs is not None:
            self._graphs.close()
        if self._drafting is not None:
            self._drafting.close()
        if self._tiers is None or self._tiers.close():
            self._kv_pool.close()

    def _load(self, schedule: Schedule) -> LayersInLoading | None:
        """Begin what the schedule loads from the host."""
        if not schedule.loads:
            return None
        if self._tiers is None:
            raise ValueError("the schedule loads pages, but this runner has no host tier.")
        return self._tiers.loader.start(schedule.loads)

    def _decode(
        self,
        schedule: Schedule,
        states: Sequence[SequenceState],
        loading: LayersInLoading | None,
        outputs: list[SequenceOutput],
    ) -> StepRows | None:
        """A decode step by a captured graph; None, and nothing has happened, for another."""
        graphs = self._graphs
        size = None if graphs is None else self._inputs.decode_size(schedule, states)
        if graphs is None or size is None or not graphs.takes(len(states), size[0]):
            return None
        num_tokens, widths = size
        longest = self._inputs.fill_decode(schedule, states, widths, graphs.inputs)
        if loading is not None:
            loading.wait()  # a replay can't stop between layers
        step = graphs.decode(len(states), num_tokens, longest)
        draws = widths or (1,) * len(states)
        at = range(len(states))
        drawn = self._draw(schedule, states, at, draws, step.logits, outputs, in_place=True)
        attention = replace(step.attention, max_query_len=max(draws), max_seq_len=longest)
        ends = tuple(accumulate(draws))
        return StepRows(step.hidden_states, step.positions, attention, ends, draws, drawn)

    def _compute(
        self,
        schedule: Schedule,
        states: Sequence[SequenceState],
        loading: LayersInLoading | None,
        outputs: list[SequenceOutput],
    ) -> StepRows:
        """Any step, kernel call by kernel call."""
        batch = self._inputs.build(schedule, states)
        layers = self._kv_pool.layers if loading is None else loading
        hidden_states: torch.Tensor = self._model(
            batch.input_ids, batch.positions, layers, batch.attention
        )
        if loading is not None and self._drafting is not None:
            loading.wait()  # drafts read layers that the model has not asked for
        scored_rows = hidden_states
        if batch.scored or sum(batch.draws) != len(hidden_states):  # not every row in order
            scored_rows = ops.embedding(batch.logits_indices, hidden_states)
        drawn = self._sample(schedule, states, batch, scored_rows, outputs)
        self._score(states, batch, scored_rows, outputs)
        draws = [0] * len(states)
        for i, count in zip(batch.sampled, batch.draws, strict=True):
            draws[i] = count
        ends = batch.attention.query_start_loc[1:].tolist()
        return StepRows(hidden_states, batch.positions, batch.attention, ends, draws, drawn)

    def _sample(
        self,
        schedule: Schedule,
        states: Sequence[SequenceState],
        batch: ForwardBatch,
        hidden_states: torch.Tensor,
        outputs: list[SequenceOutput],
    ) -> list[int]:
        """Draw for the sequences in batch.sampled; hidden_states: [M, N]. What each row drew."""
        drawn: list[int] = []
        for begin, end in _blocks(batch.draws, self._logits_rows):
            widths = batch.draws[begin:end]
            rows = hidden_states[len(drawn) : len(drawn) + sum(widths)]
            logits = self._model.compute_logits(rows)
            drawn += self._draw(schedule, states, batch.sampled[begin:end], widths, logits, outputs)
        return drawn

    def _draw(
        self,
        schedule: Schedule,
        states: Sequence[SequenceState],
        at: Sequence[int],
        widths: Sequence[int],
        logits: torch.Tensor,
        outputs: list[SequenceOutput],
        *,
        in_place: bool = False,
    ) -> list[int]:
        """Draw for the sequences `at`, widths[i] rows of logits each. What each row drew.

        in_place: see Sampler.
        """
        sampler = self._sampler
        masks: list[bytes | None] = []
        for i, width in zip(at, widths, strict=True):
            allowed = schedule.sequences[i].allowed_tokens
            masks += _NO_MASKS[:width] if allowed is None else allowed[:width]
        drafted = None if len(masks) == len(at) else widths
        sequences = [states[i] for i in at]
        drawn = sampler.sample(logits, sequences, masks, drafted, in_place=in_place)
        for i, output in zip(at, drawn, strict=True):
            outputs[i] = output
        return sampler.row_token_ids

    def _score(
        self,
        states: Sequence[SequenceState],
        batch: ForwardBatch,
        hidden_states: torch.Tensor,
        outputs: list[SequenceOutput],
    ) -> None:
        """Score the prompt rows of batch.scored; hidden_states: [M, N]."""
        row = sum(batch.draws)
        for run in batch.scored:
            entries, error = self._score_run(states[run.index], run, hidden_states[row:])
            row += run.num_tokens
            if error is None:
                outputs[run.index] = replace(outputs[run.index], prompt_logprobs=entries)
            else:
                outputs[run.index] = SequenceOutput(states[run.index].seq_id, error=error)

    def _score_run(
        self, state: SequenceState, run: ScoredRun, hidden_states: torch.Tensor
    ) -> tuple[tuple[TokenLogprobs, ...], str | None]:
        """One run, its rows the first of hidden_states, a block of logits at a time."""
        entries: list[TokenLogprobs] = []
        for begin in range(0, run.num_tokens, self._logits_rows):
            end = min(begin + self._logits_rows, run.num_tokens)
            logits = self._model.compute_logits(hidden_states[begin:end])
            more, error = score_prompt(logits, state, run.start + begin)
            if error is not None:
                return (), error
            entries.extend(more)
        return tuple(entries), None


_NO_MASKS = (None,) * (1 + MAX_DRAFT_TOKENS)


def _blocks(widths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Consecutive sequences [begin, end) of `most` rows together, or of one where that has more."""
    begin = rows = 0
    for at, width in enumerate(widths):
        if rows and rows + width > most:
            yield begin, at
            begin, rows = at, 0
        rows += width
    if rows:
        yield begin, len(widths)


def _with_loads(output: StepOutput, loading: LayersInLoading | None) -> StepOutput:
    """The output once all loads are in place: their slots are free again with it."""
    if loading is None:
        return output
    loading.wait()
    return replace(output, load_bytes=loading.num_bytes, load_s=loading.seconds)
