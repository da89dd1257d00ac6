"""StepPlanner: which running sequences compute what in the next step, and who joins them."""

from collections.abc import Iterator

from moestro.core.request import Sequence, SequenceStatus
from moestro.core.step import ScheduledSequence
from moestro.kvcache.manager import KVCacheManager
from moestro.scheduler import policy as policies
from moestro.scheduler.budget import SchedulerLimits, TokenBudget
from moestro.scheduler.drafting import DraftPolicy, DraftRoom
from moestro.scheduler.grammar_driver import GrammarDriver, GrammarError
from moestro.scheduler.lookahead import future_len
from moestro.scheduler.roster import Roster
from moestro.scheduler.step_builder import StepBuilder, wants_prompt_logprobs

_RUNNING = SequenceStatus.RUNNING


class StepPlanner:
    """Fills steps from the roster, by budget, pages and policy.

    max_len: the longest a sequence may become. A sequence counts as long as its steps in flight
    may make it; one that may have reached its end with them is not planned until that is known.
    Drafts give way to tokens, and to pages, that any running sequence needs.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVCacheManager,
        roster: Roster,
        grammar: GrammarDriver,
        drafts: DraftPolicy | None,
        max_len: int,
        preempts_for_priority: bool,
    ) -> None:
        self._limits = limits
        self._kv = kv
        self._page_size = kv.page_size
        self._roster = roster
        self._grammar = grammar
        self._max_len = max_len
        self._preempts_for_priority = preempts_for_priority
        self._budget = TokenBudget(limits.max_num_batched_tokens)
        self._room: DraftRoom | None = None
        if drafts is not None:
            max_positions = min(limits.max_model_len, kv.capacity_tokens)
            self._room = DraftRoom(drafts, kv.page_size, max_positions)
        self._last_turn: tuple[int, int] | None = None
        self._failed: dict[Sequence, GrammarError] = {}

    def must_wait(self) -> bool:
        """Whether the next step needs the outputs of those in flight: a grammar allows what it
        allows only behind the tokens that were said."""
        return any(
            seq.num_pending_tokens and seq.request.params.grammar is not None
            for seq in self._roster.running
        )

    def plan(self, step: StepBuilder) -> dict[Sequence, GrammarError]:
        """Fill `step`; sequences that are not in it because their grammar failed, still running."""
        self._failed = {}
        self._budget.open_step()
        if self._preempts_for_priority:
            self._make_room()
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for seq in self._roster.running:
            pending = seq.num_pending_tokens
            future = len(seq.token_ids) + pending
            if future - seq.num_computed_tokens != 1:
                prefills.append(seq)
            elif not pending or future < self._end_of(seq):
                decodes.append(seq)
        self._plan_mixed(step, decodes, prefills)
        return self._failed

    def _plan_mixed(
        self, step: StepBuilder, decodes: list[Sequence], prefills: list[Sequence]
    ) -> None:
        budget, roster = self._budget, self._roster
        may_admit = len(roster.queue) > 0 and len(roster.running) < self._limits.max_num_seqs
        prefill_waits = may_admit or bool(prefills)
        if self._room is not None:
            self._open_room(self._room, decodes, prefill_waits)
        limit = budget.decode_limit(len(decodes), prefill_waits)
        if limit >= len(decodes):
            for seq in decodes:
                self._plan_running(step, seq)
            self._plan_prompts(step, prefills)
            return
        rows = policies.turn_order(decodes, self._last_turn, roster.key)
        self._plan_turns(step, rows, limit)
        self._plan_prompts(step, prefills)
        self._plan_turns(step, rows, budget.left)

    def _open_room(self, room: DraftRoom, decodes: list[Sequence], prefill_waits: bool) -> None:
        size = self._page_size
        num_growing = sum(seq.num_computed_tokens >= len(seq.pages) * size for seq in decodes)
        num_rows = len(decodes)
        room.open_step(num_rows, self._budget.draft_limit(num_rows, prefill_waits), num_growing)

    def _plan_turns(self, step: StepBuilder, rows: Iterator[Sequence], limit: int) -> None:
        """Plan decode rows up to `limit` tokens; the next turns begin behind the last of them."""
        stop_at = self._budget.left - limit
        while self._budget.left > stop_at:
            seq = next(rows, None)
            if seq is None:
                return
            self._plan_running(step, seq)
            if seq.seq_id in step.runs:
                self._last_turn = self._roster.key(seq)

    def _plan_prompts(self, step: StepBuilder, prefills: list[Sequence]) -> None:
        for seq in prefills:
            self._plan_running(step, seq)
        self._admit(step)

    def _plan_running(self, step: StepBuilder, seq: Sequence) -> None:
        """Plan the next run of a running sequence, unless it must wait for a page."""
        if seq.status is not _RUNNING:  # preempted a moment ago
            return
        start = seq.num_computed_tokens
        num_tokens = policies.chunk_size(future_len(seq) - start, self._budget.left)
        if num_tokens == 0:
            return
        end, size = start + num_tokens, self._page_size
        num_drafts = num_next = 0
        if self._room is not None:
            if end > len(seq.pages) * size:
                self._room.num_growing -= 1
            available = self._kv.num_available_pages
            num_drafts, num_next = self._choose_drafts(self._room, seq, end, available)
        last = end + num_drafts + max(0, num_next - 1)
        new_pages: tuple[int, ...] | None = ()
        if last > len(seq.pages) * size:
            new_pages = self._kv.grow(seq, last)
        if new_pages is None and last > end:
            num_drafts, num_next, last = 0, 0, end
            new_pages = self._kv.grow(seq, last)
        while new_pages is None:
            victim = policies.choose_victim(self._roster.running, seq, step.runs)
            if victim is None:
                return
            self._roster.preempt(victim)
            new_pages = self._kv.grow(seq, last)
        run = self._make_run(seq, num_tokens, new_pages, num_drafts, num_next)
        if run is not None:
            step.add(seq, run)

    def _make_run(
        self,
        seq: Sequence,
        num_tokens: int,
        new_pages: tuple[int, ...],
        num_drafts: int,
        num_next: int,
    ) -> ScheduledSequence | None:
        """The next run of `seq`, taken off the budget; None when its grammar fails."""
        start = seq.num_computed_tokens
        samples = start + num_tokens == future_len(seq)
        masks = None
        if samples and seq.request.params.grammar is not None:
            try:
                masks = self._grammar.masks(seq, seq.draft_token_ids[:num_drafts])
            except GrammarError as error:
                self._failed[seq] = error
                return None
            num_drafts = len(masks) - 1
        if self._room is not None:
            self._room.tokens_left -= num_drafts
        num_tokens += num_drafts
        self._budget.left -= num_tokens
        return ScheduledSequence(
            seq.seq_id, start, num_tokens, new_pages, samples, masks, num_drafts, num_next
        )

    def _choose_drafts(
        self, room: DraftRoom, seq: Sequence, end: int, num_available_pages: int
    ) -> tuple[int, int]:
        """Drafts that a run which otherwise ends at `end` verifies, and how many it asks for.

        Of the longest run and of the drafts after it, nothing may lie behind the sequence's last
        token or where there are no pages.
        """
        future, end_of = future_len(seq), self._end_of(seq)
        if end != future:
            return 0, 0
        num_positions = room.num_positions(seq, num_available_pages)
        num_drafts = min(
            seq.num_next_drafts, room.tokens_left, end_of - future - 1, num_positions - end
        )
        num_drafts = max(0, num_drafts)
        # A step too small for any draft will hardly be followed by one that isn't.
        wanted = room.policy.num_drafts(seq, room.num_rows) if room.tokens_left else 0
        # Where the step after begins is not known yet: at least one token further than now.
        num_next = min(
            wanted, end_of - len(seq.token_ids) - 2, num_positions - end - num_drafts + 1
        )
        return num_drafts, max(0, num_next)

    def _admit(self, step: StepBuilder) -> None:
        """Admit waiting sequences in strict order: one that does not fit holds up the rest.

        So does one that was preempted while a step computes it, until its tokens are known.
        """
        kv = self._kv
        while self._budget.left and len(self._roster.running) < self._limits.max_num_seqs:
            seq = self._roster.queue.peek()
            if (
                seq is None
                or seq.num_runs_in_flight
                or seq in self._failed
                or not kv.admit(seq, self._headroom(), not wants_prompt_logprobs(seq))
            ):
                return
            self._roster.start(seq)
            num_remaining = len(seq.token_ids) - seq.num_computed_tokens
            num_tokens = policies.chunk_size(num_remaining, self._budget.left)
            num_next = 0
            if self._room is not None:
                # Only in pages that it has: others wait for those that are left.
                end = seq.num_computed_tokens + num_tokens
                _, num_next = self._choose_drafts(self._room, seq, end, 0)
            run = self._make_run(seq, num_tokens, tuple(seq.pages), 0, num_next)
            if run is not None:
                step.add_admitted(seq, run)

    def _make_room(self) -> None:
        """Preempt sequences of strictly lower priority than the one to admit, if that admits it."""
        head = self._roster.queue.peek()
        if head is None or head.num_runs_in_flight:
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

    def _end_of(self, seq: Sequence) -> int:
        """How long `seq` can become."""
        request = seq.request
        return min(self._max_len, len(request.prompt_token_ids) + request.max_tokens)
