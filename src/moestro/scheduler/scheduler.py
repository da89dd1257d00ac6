"""Scheduler: continuous batching over paged KV.

A step computes, under one token budget, one token of every decoding sequence (they take turns
when the budget is smaller), then chunks of prompts, then chunks of newly admitted ones. Pages for
all known tokens are taken at admission, so only sequences that grow can run out of them; then the
last sequence in the policy's order is preempted: its pages are released and it waits with its
tokens kept. Nothing here depends on time or on the tokens of another request.
"""

from collections.abc import Iterator

from moestro.core.grammar import GrammarCompiler
from moestro.core.kv_hints import HintAnswer
from moestro.core.messages import EngineStats
from moestro.core.request import FinishReason, Request, Sequence, SequenceStatus
from moestro.core.step import Schedule, ScheduledSequence, SequenceOutput, StepOutput
from moestro.errors import RequestError
from moestro.kvcache.manager import KVCacheManager
from moestro.scheduler import policy as policies
from moestro.scheduler.budget import SchedulerLimits, TokenBudget
from moestro.scheduler.completion import check_finish, check_prompt
from moestro.scheduler.grammar_driver import GrammarDriver, GrammarError
from moestro.scheduler.roster import Roster
from moestro.scheduler.sequence_update import SequenceUpdate
from moestro.scheduler.step_builder import StepBuilder, wants_prompt_logprobs

_RUNNING = SequenceStatus.RUNNING


class Scheduler:
    """Owns every sequence from `add` to its end. Not thread-safe: one loop drives it.

    The loop is: schedule, execute, update. A sequence of n siblings waits for the first one's
    prompt when it can share its pages. `grammar` None refuses constrained requests.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVCacheManager,
        policy: str = "fcfs",
        grammar: GrammarCompiler | None = None,
        vocab_size: int = 0,
    ) -> None:
        self._limits = limits
        self._kv = kv
        self._page_size = kv.page_size
        self._key = policies.sort_key_of(policy)
        self._preempts_for_priority = policy == "priority"
        self._grammar = GrammarDriver(grammar, vocab_size)
        self._budget = TokenBudget(limits.max_num_batched_tokens)
        # The last token of a sequence is sampled but never computed: it needs no KV.
        self._max_len = min(limits.max_model_len, kv.capacity_tokens + 1)
        self._roster = Roster(kv, self._key)
        self._failures: list[SequenceUpdate] = []
        self._last_turn: tuple[int, int] | None = None
        self._in_flight: int | None = None
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
            self._roster.end(seq, FinishReason.ABORT, None)
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
        self._roster.end(seq, reason, stop_reason)
        if keep_output_tokens is not None:
            del seq.token_ids[seq.num_prompt_tokens + keep_output_tokens :]
        return seq.hint_answer

    def has_work(self) -> bool:
        """Whether schedule has something to do."""
        return bool(self._roster.live or self._failures)

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
        """How long a step took, for the choice between loading pages and computing them again."""
        num_tokens = schedule.num_tokens
        if num_tokens > 2 * len(schedule.sequences):
            self._kv.note_prefill(num_tokens, seconds)

    def schedule(self) -> Schedule | None:
        """Plan the next step; None when there is no work, or all of it waits (see wait).

        A Schedule without sequences is possible: it only carries releases, or its update only
        reports sequences whose grammar failed. Call update before the next schedule.
        """
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight} has not been updated yet")
        is_moving = self.tend()
        if not self.has_work():
            return None
        self._budget.open_step()
        step = StepBuilder(self._num_steps)
        if self._preempts_for_priority:
            self._make_room()
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for seq in self._roster.running:
            one_left = len(seq.token_ids) - seq.num_computed_tokens == 1
            (decodes if one_left else prefills).append(seq)
        self._plan_mixed(step, decodes, prefills)
        self._attach_grammar(step)
        if not (step.admitted or step.runs or self._failures or self._roster.has_released) and (
            is_moving or self._roster.num_fetching
        ):
            return None
        released = self._roster.take_released()
        for seq_id in step.admitted:
            self._roster.introduce(seq_id)
        schedule = step.build(released, self._kv.take_loads())
        self._in_flight = step.step_id
        self._num_steps += 1
        self._last_step_tokens = step.num_tokens
        return schedule

    def update(self, schedule: Schedule, output: StepOutput) -> list[SequenceUpdate]:
        """Apply what a step gave; what changed, in schedule order, sequences without news left out.

        Sequences that ended since the schedule was made are skipped. Raises ValueError when
        output and schedule don't belong together.
        """
        if schedule.step_id != self._in_flight or output.step_id != schedule.step_id:
            raise ValueError(
                f"step {self._in_flight} is in flight, got the schedule of {schedule.step_id} "
                f"and the output of {output.step_id}"
            )
        self._in_flight = None
        self._kv.end_step(output.load_bytes, output.load_s)
        updates, self._failures = self._failures, []
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

    # Planning

    def _plan_mixed(
        self, step: StepBuilder, decodes: list[Sequence], prefills: list[Sequence]
    ) -> None:
        budget, roster = self._budget, self._roster
        may_admit = len(roster.queue) > 0 and len(roster.running) < self._limits.max_num_seqs
        limit = budget.decode_limit(len(decodes), may_admit or bool(prefills))
        if limit >= len(decodes):
            for seq in decodes:
                self._plan_running(step, seq)
            self._plan_prompts(step, prefills)
            return
        rows = policies.turn_order(decodes, self._last_turn, self._key)
        self._plan_turns(step, rows, limit)
        self._plan_prompts(step, prefills)
        self._plan_turns(step, rows, budget.left)

    def _plan_turns(self, step: StepBuilder, rows: Iterator[Sequence], limit: int) -> None:
        """Plan decode rows up to `limit` tokens; the next turns begin behind the last of them."""
        stop_at = self._budget.left - limit
        while self._budget.left > stop_at:
            seq = next(rows, None)
            if seq is None:
                return
            self._plan_running(step, seq)
            if seq.seq_id in step.runs:
                self._last_turn = self._key(seq)

    def _plan_prompts(self, step: StepBuilder, prefills: list[Sequence]) -> None:
        for seq in prefills:
            self._plan_running(step, seq)
        self._admit(step)

    def _plan_running(self, step: StepBuilder, seq: Sequence) -> None:
        """Plan the next run of a running sequence, unless it must wait for a page."""
        if seq.status is not _RUNNING:  # preempted a moment ago
            return
        start = seq.num_computed_tokens
        num_tokens = policies.chunk_size(len(seq.token_ids) - start, self._budget.left)
        if num_tokens == 0:
            return
        end = start + num_tokens
        new_pages: tuple[int, ...] | None = ()
        if end > len(seq.pages) * self._page_size:
            new_pages = self._kv.grow(seq, end)
        while new_pages is None:
            victim = policies.choose_victim(self._roster.running, seq, step.runs)
            if victim is None:
                return
            self._roster.preempt(victim)
            new_pages = self._kv.grow(seq, end)
        step.add(seq, num_tokens, new_pages)
        self._budget.left -= num_tokens

    def _admit(self, step: StepBuilder) -> None:
        """Admit waiting sequences in strict order: one that does not fit holds up the rest."""
        while self._budget.left and len(self._roster.running) < self._limits.max_num_seqs:
            seq = self._roster.queue.peek()
            if seq is None or not self._kv.admit(
                seq, self._headroom(), not wants_prompt_logprobs(seq)
            ):
                return
            self._roster.start(seq)
            num_remaining = len(seq.token_ids) - seq.num_computed_tokens
            num_tokens = policies.chunk_size(num_remaining, self._budget.left)
            step.add_admitted(seq, num_tokens)
            self._budget.left -= num_tokens

    def _make_room(self) -> None:
        """Preempt sequences of strictly lower priority than the one to admit, if that admits it."""
        head = self._roster.queue.peek()
        if head is None:
            return
        priority = head.request.priority
        lower = [seq for seq in self._roster.running if seq.request.priority > priority]
        use_cache = not wants_prompt_logprobs(head)
        while lower:
            has_slot = len(self._roster.running) < self._limits.max_num_seqs
            short = self._kv.pages_short(head, self._headroom(), use_cache)
            if (has_slot and not short) or short > sum(len(seq.pages) for seq in lower):
                return
            self._roster.preempt(lower.pop())

    def _headroom(self) -> int:
        return policies.admission_headroom(len(self._roster.running), self._kv.num_pages)

    def _attach_grammar(self, step: StepBuilder) -> None:
        for run in list(step.runs.values()):
            seq = self._roster.live[run.seq_id]
            if not run.samples or seq.request.params.grammar is None:
                continue
            try:
                step.constrain(run, (self._grammar.allowed_tokens(seq),))
            except GrammarError as error:
                step.remove(seq)
                self._failures.append(self._fail(seq, str(error)))

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
        # Only what the step computed; the token it sampled has no KV yet.
        self._kv.publish(seq, run.start + run.num_tokens)
        new = result.token_ids
        if finish is not None:
            new = tuple(seq.token_ids[old_len:])
            self._roster.end(seq, *finish)
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

    def _fail(self, seq: Sequence, error: str) -> SequenceUpdate:
        self._roster.end(seq, FinishReason.ERROR, None)
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
