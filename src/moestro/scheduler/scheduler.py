"""Scheduler: continuous batching over paged KV.

A step computes, under one token budget, one token of every decoding sequence (they take turns
when the budget is smaller), then chunks of prompts, then chunks of newly admitted ones. Pages for
all known tokens are taken at admission, so only sequences that grow can run out of them; then the
last sequence in the policy's order is preempted: its pages are released and it waits with its
tokens kept. Nothing here depends on time or on the tokens of another request.

Steps may be planned ahead of their predecessors' outputs (see lookahead); without, it is the same
code, one step at a time.
"""

from collections import deque
from dataclasses import dataclass, field

from moestro.core.grammar import GrammarCompiler
from moestro.core.kv_hints import HintAnswer
from moestro.core.messages import EngineStats
from moestro.core.request import FinishReason, Request, Sequence, SequenceStatus
from moestro.core.step import Schedule, ScheduledSequence, SequenceOutput, StepOutput
from moestro.errors import RequestError
from moestro.kvcache.manager import KVCacheManager
from moestro.scheduler.budget import SchedulerLimits
from moestro.scheduler.completion import check_finish, check_prompt
from moestro.scheduler.drafting import DraftPolicy
from moestro.scheduler.grammar_driver import GrammarDriver, GrammarError
from moestro.scheduler.lookahead import note_output, num_committed
from moestro.scheduler.policy import sort_key_of
from moestro.scheduler.roster import Roster
from moestro.scheduler.sequence_update import SequenceUpdate
from moestro.scheduler.step_builder import StepBuilder, wants_prompt_logprobs
from moestro.scheduler.step_planner import StepPlanner

_RUNNING = SequenceStatus.RUNNING


@dataclass(frozen=True, slots=True)
class _OpenStep:
    """A step that is planned and not updated yet; failures: found while it was planned."""

    step_id: int
    failures: list[SequenceUpdate] = field(default_factory=list)


class Scheduler:
    """Owns every sequence from `add` to its end. Not thread-safe: one loop drives it.

    The loop is: schedule, execute, update; with limits.max_steps_ahead, so many more schedules
    may be made before the update of the oldest. A sequence of n siblings waits for the first
    one's prompt when it can share its pages. `grammar` None refuses constrained requests;
    `drafts` None drafts nothing.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVCacheManager,
        policy: str = "fcfs",
        grammar: GrammarCompiler | None = None,
        vocab_size: int = 0,
        drafts: DraftPolicy | None = None,
    ) -> None:
        self._limits = limits
        self._kv = kv
        self._grammar = GrammarDriver(grammar, vocab_size)
        self._drafts = drafts
        # The last token of a sequence is sampled but never computed: it needs no KV.
        self._max_len = min(limits.max_model_len, kv.capacity_tokens + 1)
        self._roster = Roster(kv, sort_key_of(policy))
        self._planner = StepPlanner(
            limits, kv, self._roster, self._grammar, drafts, self._max_len, policy == "priority"
        )
        self._open: deque[_OpenStep] = deque()
        self._next_seq_id = 0
        self._num_steps = 0
        self._last_step_tokens = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0

    def add(self, request: Request) -> list[Sequence]:
        """Accept a request; returns its n sequences, which stay the scheduler's.

        Raises RequestError (duplicate id, empty prompt, bad token id, prompt beyond the context)
        or CapacityError (prompt beyond the KV memory), and then nothing has changed.
        """
        if self._roster.of_request(request.request_id):
            raise RequestError(f"request_id {request.request_id!r} is in use.", "request_id")
        check_prompt(request, self._limits, self._kv.capacity_tokens)
        self._grammar.check(request)
        prompt = request.prompt_token_ids
        first = Sequence(self._next_seq_id, request, 0, list(prompt))
        try:
            self._kv.pack(first)
        except OverflowError:
            raise RequestError("prompt_token_ids must be in [0, 2^32).", "prompt") from None
        sequences = [first]
        for index in range(1, request.params.n):
            seq = Sequence(self._next_seq_id + index, request, index, list(prompt))
            seq.packed_tokens = first.packed_tokens
            sequences.append(seq)
        self._next_seq_id += len(sequences)
        shares_pages = self._kv.enable_prefix_caching and len(prompt) > self._kv.page_size
        fetches = self._kv.prefetch(first, not wants_prompt_logprobs(first))
        self._roster.add(request, sequences, hold_siblings=shares_pages, fetches=fetches)
        return sequences

    def abort(self, request_id: str) -> list[Sequence]:
        """End every live sequence of a request, at whatever stage; returns them."""
        sequences = self._roster.of_request(request_id)
        for seq in sequences:
            self._end(seq, FinishReason.ABORT, None)
        return sequences

    def finish(
        self,
        seq_id: int,
        reason: FinishReason,
        stop_reason: int | str | None,
        keep_output_tokens: int | None = None,
    ) -> HintAnswer | None:
        """End a sequence from outside (a stop string in its text), keeping so many output tokens.

        What became of its request's kv_hints. Does nothing when it has ended already.
        """
        seq = self._roster.live.get(seq_id)
        if seq is None:
            return None
        self._end(seq, reason, stop_reason)
        if keep_output_tokens is not None:
            del seq.token_ids[seq.num_prompt_tokens + keep_output_tokens :]
        return seq.hint_answer

    def has_work(self) -> bool:
        """Whether a sequence lives or a step is open."""
        return bool(self._roster.live or self._open)

    @property
    def plans_ahead(self) -> bool:
        """Whether a step may be planned before the update of the one before it."""
        return self._limits.max_steps_ahead > 0

    @property
    def may_plan(self) -> bool:
        """Whether so few steps are open that schedule may be called."""
        return len(self._open) <= self._limits.max_steps_ahead

    def wait(self, timeout_s: float) -> None:
        """Sleep until something that moves in lower tiers may have arrived, at most so long.

        For when schedule has work and plans nothing: all of it waits for moves.
        """
        self._kv.wait(timeout_s)

    def tend(self) -> bool:
        """Let moves between tiers go on, without a step; whether some are under way.

        For when there is no work: what was computed still sinks. schedule does it by itself.
        """
        for seq_id in self._kv.poll():
            self._roster.let_in(seq_id)
        return self._kv.is_moving

    def note_step(self, schedule: Schedule, seconds: float) -> None:
        """How long the device worked on a step: for the choice between loading pages and computing
        them again, and for the one of how much to draft."""
        num_sequences, num_tokens, num_drafts = len(schedule.sequences), schedule.num_tokens, 0
        if self._drafts is not None:
            num_drafts = sum(run.num_draft_tokens for run in schedule.sequences)
        if num_tokens - num_drafts > 2 * num_sequences:
            self._kv.note_prefill(num_tokens, seconds)
        elif self._drafts is not None and num_tokens - num_drafts == num_sequences > 0:
            num_next = sum(run.num_next_drafts for run in schedule.sequences)
            self._drafts.note_step(num_sequences, num_tokens, num_next, seconds)

    def schedule(self) -> Schedule | None:
        """Plan the next step; None when there is nothing to plan: no work, or all of it waits for
        moves (see wait) or for the update of an open step.

        A Schedule without sequences is possible: it only carries releases, or its update only
        reports sequences whose grammar failed. Raises RuntimeError when more steps are open than
        limits.max_steps_ahead.
        """
        if not self.may_plan:
            raise RuntimeError(f"step {self._open[0].step_id} has not been updated yet")
        is_moving = self.tend()
        if not self._roster.live or (self._open and self._planner.must_wait()):
            return None
        step = StepBuilder(self._num_steps)
        failures = [self._fail(seq, str(error)) for seq, error in self._planner.plan(step).items()]
        if not (step.runs or failures):
            waits = is_moving or self._roster.num_fetching
            if self._open or (waits and not self._roster.has_released):
                return None
        released = self._roster.take_released()
        for seq_id in step.admitted:
            self._roster.introduce(seq_id)
        schedule = step.build(released, self._kv.take_loads())
        self._open.append(_OpenStep(step.step_id, failures))
        self._num_steps += 1
        self._last_step_tokens = step.num_tokens
        return schedule

    def update(self, schedule: Schedule, output: StepOutput) -> list[SequenceUpdate]:
        """Apply what the oldest open step gave; what changed, in schedule order, sequences without
        news left out.

        Sequences that ended since the schedule was made are skipped. Raises ValueError when
        output and schedule don't belong together.
        """
        oldest = self._open[0] if self._open else None
        if oldest is None or not oldest.step_id == schedule.step_id == output.step_id:
            raise ValueError(
                f"step {oldest and oldest.step_id} is the oldest in flight, got the schedule of "
                f"{schedule.step_id} and the output of {output.step_id}"
            )
        self._open.popleft()
        self._kv.end_step(output.load_bytes, output.load_s)
        updates = oldest.failures
        live = self._roster.live
        for run, result in zip(schedule.sequences, output.sequences, strict=True):
            if run.seq_id != result.seq_id:
                raise ValueError(f"output of sequence {result.seq_id} in place of {run.seq_id}")
            seq = live.get(run.seq_id)
            if seq is not None:
                update = self._apply(seq, run, result)
                if update is not None:
                    updates.append(update)
        return updates

    def stats(self) -> EngineStats:
        """Gauges and counters as of now."""
        kv = self._kv.stats()
        return EngineStats(
            num_running=len(self._roster.running),
            num_waiting=self._roster.num_waiting,
            num_pages=kv.num_pages,
            num_pages_used=kv.num_used_pages,
            num_preemptions=self._roster.num_preemptions,
            prefix_queries_tokens=kv.queries_tokens,
            prefix_hits_tokens=kv.hits_tokens,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            num_steps=self._num_steps,
            last_step_tokens=self._last_step_tokens,
        )

    # Applying results

    def _apply(
        self, seq: Sequence, run: ScheduledSequence, result: SequenceOutput
    ) -> SequenceUpdate | None:
        if result.error is not None:
            return self._fail(seq, result.error)
        old_len = len(seq.token_ids)
        finish: tuple[FinishReason, int | None] | None = None
        error = None
        try:
            finish = self._append(seq, result.token_ids)
        except GrammarError as refused:
            finish, error = (FinishReason.ERROR, None), str(refused)
        note_output(seq, run, result)
        if seq.status is _RUNNING:  # one that was preempted meanwhile holds no pages
            self._kv.publish(seq, num_committed(seq, run))
        num_drafts, num_accepted = result.num_draft_tokens, result.num_accepted_tokens
        if num_drafts and self._drafts is not None:
            self._drafts.note_output(seq, num_drafts, num_accepted)
        new = result.token_ids
        if finish is not None:
            new = tuple(seq.token_ids[old_len:])
            self._end(seq, *finish)
        if new:
            self._generation_tokens += len(new)
            if old_len == seq.num_prompt_tokens:
                self._finish_prompt(seq)
        elif finish is None and not result.prompt_logprobs:
            return None
        seq.num_prompt_logprobs += len(result.prompt_logprobs)
        reason, stop_reason = finish or (None, None)
        return SequenceUpdate(
            seq.seq_id,
            seq.request.request_id,
            seq.index,
            new,
            result.logprobs[: len(new)],
            result.prompt_logprobs,
            seq.num_cached_tokens,
            reason,
            stop_reason,
            error,
            seq.prefix,
            seq.hint_answer,
            num_drafts,
            num_accepted,
        )

    def _finish_prompt(self, seq: Sequence) -> None:
        """Its prompt is computed and published: count it once, let its siblings in."""
        if seq.index == 0:
            self._prompt_tokens += seq.num_prompt_tokens
        self._roster.let_siblings_in(seq)

    def _append(
        self, seq: Sequence, token_ids: tuple[int, ...]
    ) -> tuple[FinishReason, int | None] | None:
        """Append sampled tokens up to the first that ends the sequence. Raises GrammarError."""
        for token_id in token_ids:
            seq.token_ids.append(token_id)
            finish = check_finish(seq, token_id, self._max_len)
            if seq.matcher is not None and (finish is None or finish[0] is not FinishReason.STOP):
                try:
                    self._grammar.accept(seq, token_id)
                except GrammarError:
                    seq.token_ids.pop()
                    raise
                if finish is None and self._grammar.must_end(seq):
                    finish = FinishReason.STOP, None
            if finish is not None:
                return finish
        return None

    def _end(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        self._roster.end(seq, reason, stop_reason)
        if self._drafts is not None:
            self._drafts.forget(seq.seq_id)

    def _fail(self, seq: Sequence, error: str) -> SequenceUpdate:
        self._end(seq, FinishReason.ERROR, None)
        return SequenceUpdate(
            seq.seq_id,
            seq.request.request_id,
            seq.index,
            num_cached_tokens=seq.num_cached_tokens,
            finish_reason=FinishReason.ERROR,
            error=error,
            prefix=seq.prefix,
            hint_answer=seq.hint_answer,
        )
