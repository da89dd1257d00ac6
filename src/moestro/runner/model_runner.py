"""ModelRunner: executes schedules on one model and its KV pool."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from moestro import ops
from moestro.backends.base import GraphPool
from moestro.core.plan import LOGITS_BLOCK_BYTES
from moestro.core.step import Schedule, SequenceOutput, StepOutput, TokenLogprobs
from moestro.models.causal_lm import CausalLM
from moestro.runner.expert_counter import ExpertCounter
from moestro.runner.forward_batch import ForwardBatch, ScoredRun
from moestro.runner.graphs import DecodeGraphs, Told
from moestro.runner.inputs import InputBuilder
from moestro.runner.kv_pool import KVPool
from moestro.runner.kv_tiers import KVTiers
from moestro.runner.page_loader import LayersInLoading
from moestro.runner.sampler import Sampler, score_prompt
from moestro.runner.sequence_state import SequenceState


class ModelRunner:
    """The Runner that computes. It obeys the schedule and decides nothing.

    Owns the KV pool and the state of every sequence between its first schedule and its release.
    Row i of a batch has the same bits whatever the other rows are, as far as the ops keep theirs.
    tiers: what moves pages to and from this pool, closed with it; schedules may then hold loads.
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
    ) -> None:
        self._model = model
        self._tiers = tiers
        self._kv_pool = kv_pool
        self._inputs = InputBuilder(max_num_seqs, max_model_len, kv_pool.page_size)
        self._experts = ExpertCounter(model)
        self._sampler = Sampler(None if graph_pool is None else graph_pool.apart())
        self._logits_rows = max(1, logits_block_bytes // (4 * model.spec.vocab_size))
        self._graphs: DecodeGraphs | None = None
        if graph_pool is not None:
            self._graphs = DecodeGraphs(
                graph_pool,
                model,
                kv_pool,
                max_num_seqs=max_num_seqs,
                max_num_tokens=min(max_num_seqs, self._logits_rows),
                page_table_width=self._inputs.page_table_width,
            )

    @torch.inference_mode()
    def warm_up(self, told: Told | None = None) -> None:
        """Capture the usual decode steps. told: sizes captured, and in all."""
        if self._graphs is not None:
            self._graphs.warm_up(told)
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

    @torch.inference_mode()
    def execute(self, schedule: Schedule) -> StepOutput:
        """Run one step. Raises ValueError for a schedule that contradicts what came before."""
        self._inputs.admit(schedule)
        if schedule.released:
            self._sampler.release()
        loading = self._load(schedule)
        if not schedule.sequences:
            counted = self._experts.take()
            return _with_loads(StepOutput(schedule.step_id, (), counted), loading)
        states = self._inputs.states(schedule)
        outputs = [SequenceOutput(state.seq_id) for state in states]
        logits = self._decode(schedule, states, loading)
        if logits is not None:
            self._draw(schedule, states, range(len(states)), logits, outputs, in_place=True)
        else:
            batch = self._inputs.build(schedule, states)
            hidden_states = self._scored_rows(batch, loading)
            self._sample(schedule, states, batch, hidden_states, outputs)
            self._score(states, batch, hidden_states, outputs)
        for state, output in zip(states, outputs, strict=True):
            for token_id in output.token_ids:
                state.append(token_id)
        counted = self._experts.due(schedule.num_tokens)
        return _with_loads(StepOutput(schedule.step_id, tuple(outputs), counted), loading)

    def close(self) -> None:
        """Give the KV memory back. The runner is of no use afterwards."""
        self._sampler.release()
        if self._graphs is not None:
            self._graphs.close()
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
    ) -> torch.Tensor | None:
        """Logits of a decode step by a captured graph; None where the step is none."""
        graphs = self._graphs
        if graphs is None or not graphs.takes(len(states)):
            return None
        longest = self._inputs.fill_decode(schedule, states, graphs.inputs)
        if longest and loading is not None:
            loading.wait()  # a replay can't stop between layers
        return graphs.decode(len(states), longest) if longest else None

    def _scored_rows(self, batch: ForwardBatch, loading: LayersInLoading | None) -> torch.Tensor:
        """[M, N]: what the rows batch.logits_indices become after the final norm."""
        layers = self._kv_pool.layers if loading is None else loading
        hidden_states: torch.Tensor = self._model(
            batch.input_ids, batch.positions, layers, batch.attention
        )
        if not batch.scored and len(batch.sampled) == len(hidden_states):
            return hidden_states  # every row in order
        rows: torch.Tensor = ops.embedding(batch.logits_indices, hidden_states)
        return rows

    def _sample(
        self,
        schedule: Schedule,
        states: Sequence[SequenceState],
        batch: ForwardBatch,
        hidden_states: torch.Tensor,
        outputs: list[SequenceOutput],
    ) -> None:
        """Draw the next token of each sequence in batch.sampled; hidden_states: [M, N]."""
        for begin in range(0, len(batch.sampled), self._logits_rows):
            at = batch.sampled[begin : begin + self._logits_rows]
            logits = self._model.compute_logits(hidden_states[begin : begin + len(at)])
            self._draw(schedule, states, at, logits, outputs)

    def _draw(
        self,
        schedule: Schedule,
        states: Sequence[SequenceState],
        at: Sequence[int],
        logits: torch.Tensor,
        outputs: list[SequenceOutput],
        *,
        in_place: bool = False,
    ) -> None:
        """Draw for the sequences `at`; logits: a row each, overwritten. in_place: see Sampler."""
        given = (schedule.sequences[i].allowed_tokens for i in at)
        masks = [None if allowed is None else allowed[0] for allowed in given]
        drawn = self._sampler.sample(logits, [states[i] for i in at], masks, in_place=in_place)
        for i, output in zip(at, drawn, strict=True):
            outputs[i] = output

    def _score(
        self,
        states: Sequence[SequenceState],
        batch: ForwardBatch,
        hidden_states: torch.Tensor,
        outputs: list[SequenceOutput],
    ) -> None:
        """Score the prompt rows of batch.scored; hidden_states: [M, N]."""
        row = len(batch.sampled)
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


def _with_loads(output: StepOutput, loading: LayersInLoading | None) -> StepOutput:
    """The output once all loads are in place: their slots are free again with it."""
    if loading is None:
        return output
    loading.wait()
    return replace(output, load_bytes=loading.num_bytes, load_s=loading.seconds)
