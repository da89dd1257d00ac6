"""A Runner without a model: tokens come from a hash, and every contract of core.step is asserted.

A sampled token depends on (seed, sample index, all tokens before it) and nothing else, so any two
schedulings of a request must give the same tokens. The KV memory is modelled slot by slot: a slot
holds the hash of the token prefix whose KV it stands for, and each run checks the whole context
it would attend to; drafts, rejected ones and those to come, leave theirs too. A page that is
shared wrongly, freed too early or reused too soon is found at the first step that would read it.
"""

from contextlib import suppress
from dataclasses import dataclass, field

from tests.fakes.fake_mover import FakeMover
from tests.fakes.scripted_matcher import compile_script

from moestro.core.step import (
    NewSequence,
    Schedule,
    ScheduledSequence,
    SequenceOutput,
    StepOutput,
    TokenLogprobs,
)

_MASK = (1 << 64) - 1


def mix(state: int, value: int) -> int:
    """Fold one value into a 64-bit hash (a round of splitmix64)."""
    x = (state ^ (value + 0x9E3779B97F4A7C15 + (state << 6) + (state >> 2))) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def prefix_hashes(token_ids: list[int] | tuple[int, ...]) -> list[int]:
    """Hash of every prefix; entry i covers token_ids[: i + 1]."""
    hashes, state = [], 1
    for token_id in token_ids:
        state = mix(state, token_id)
        hashes.append(state)
    return hashes


@dataclass(frozen=True)
class Script:
    """What the runner says. A sequence that computes `poison` gets an error instead of a token.

    max_burst > 1: a sample gives 1 to max_burst tokens without drafts, as simulators do.
    acceptance: share of the proposed drafts that are what will be said; a quarter of the proposals
    is shorter than asked for, as where nothing is found.
    """

    vocab_size: int = 50
    poison: int | None = None
    max_burst: int = 1
    acceptance: float = 0.7

    def token(
        self, new: NewSequence, num_tokens: int, prefix_hash: int, allowed: bytes | bytearray | None
    ) -> int:
        """The token after `num_tokens` known ones (prompt and output) with this prefix hash."""
        state = mix(mix(prefix_hash, new.seed), new.sample_index)
        suppress_stop = num_tokens - new.num_prompt_tokens < new.params.min_tokens
        for offset in range(self.vocab_size):
            token_id = (state + offset) % self.vocab_size
            is_allowed = allowed is None or allowed[token_id >> 3] >> (token_id & 7) & 1
            if is_allowed and not (suppress_stop and token_id in new.stop_token_ids):
                return token_id
        raise AssertionError("a mask that allows nothing was scheduled")

    def burst(self, prefix_hash: int, allowed: bytes | None) -> int:
        """How many tokens one sample gives after this prefix."""
        return 1 if allowed else 1 + prefix_hash % self.max_burst

    def drafts(self, new: NewSequence, tokens: list[int], prefix_hash: int, most: int) -> list[int]:
        """What it proposes to follow `tokens`, whose hash is prefix_hash."""
        wanted = prefix_hash % (most + 1) if prefix_hash >> 8 & 3 == 0 else most
        found: list[int] = []
        matcher = None
        if new.params.grammar is not None:
            matcher = compile_script(new.params.grammar, self.vocab_size)
            for token_id in tokens[new.num_prompt_tokens :]:
                matcher.accept(token_id)
        with suppress(Exception):  # where the grammar has no next token
            while len(found) < wanted:
                mask = None
                if matcher is not None:
                    mask = bytearray((self.vocab_size + 7) // 8)
                    matcher.fill_mask(mask)
                draft = self.token(new, len(tokens) + len(found), prefix_hash, mask)
                if (prefix_hash >> 16) % 1000 >= 1000 * self.acceptance:
                    draft = (draft + 1) % self.vocab_size
                if matcher is not None:
                    matcher.accept(draft)
                found.append(draft)
                prefix_hash = mix(prefix_hash, draft)
        return found


@dataclass
class _State:
    new: NewSequence
    tokens: list[int]
    hashes: list[int]
    pages: list[int] = field(default_factory=list)
    num_computed: int = -1
    """-1 until its first run says how much of it came from the prefix cache"""
    drafts: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    """by each of its runs, of all that could have come of it; last one first"""


class ScriptedRunner:
    """Executes schedules against the slot model; raises AssertionError on any broken rule."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        script: Script | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        mover: FakeMover | None = None,
        max_steps_ahead: int = 0,
    ) -> None:
        self._mover = mover
        self._max_steps_ahead = max_steps_ahead
        if mover is not None:
            mover.read_page = lambda page: tuple(self._slots[page])
        self.script = script or Script()
        self.num_computed_tokens = 0
        self.schedules: list[Schedule] = []
        self._page_size = page_size
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_num_batched_tokens
        self._slots: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self._states: dict[int, _State] = {}

    @property
    def known_sequences(self) -> set[int]:
        """Sequences it keeps state of."""
        return set(self._states)

    def execute(self, schedule: Schedule) -> StepOutput:
        """Check and run one step."""
        self._check_step(schedule)
        self.schedules.append(schedule)
        for seq_id in schedule.released:
            del self._states[seq_id]
        for new in schedule.new_sequences:
            assert new.seq_id not in self._states, f"sequence {new.seq_id} is new twice"
            tokens = list(new.token_ids)
            self._states[new.seq_id] = _State(new, tokens, prefix_hashes(tokens))
        for load in schedule.loads:
            assert self._mover is not None, "loads without a host tier"
            for slot, page in zip(load.slots, load.pages, strict=True):
                self._slots[page] = list(self._mover.host[slot])  # type: ignore[arg-type]
        scheduled = {run.seq_id for run in schedule.sequences}
        assert {new.seq_id for new in schedule.new_sequences} <= scheduled, "new but not scheduled"
        starts = [self._check_run(run) for run in schedule.sequences]
        self._check_sharing()
        for run, start in zip(schedule.sequences, starts, strict=True):
            self._write(run, start)
        outputs = tuple(
            self._output(run, start) for run, start in zip(schedule.sequences, starts, strict=True)
        )
        return StepOutput(schedule.step_id, outputs)

    def close(self) -> None:
        """Forget everything."""
        self._states.clear()

    def _check_step(self, schedule: Schedule) -> None:
        if self.schedules:
            assert schedule.step_id > self.schedules[-1].step_id, "steps out of order"
        ids = [run.seq_id for run in schedule.sequences]
        assert len(set(ids)) == len(ids), "a sequence is scheduled twice"
        assert len(set(schedule.released)) == len(schedule.released), "released twice"
        assert set(schedule.released) <= set(self._states), "released but never introduced"
        if self._max_num_seqs is not None:
            assert len(ids) <= self._max_num_seqs, "more sequences than max_num_seqs"
        if self._max_tokens is not None:
            assert schedule.num_tokens <= self._max_tokens, "token budget exceeded"

    def _check_run(self, run: ScheduledSequence) -> int:
        """Where the run really starts."""
        state = self._states[run.seq_id]
        state.pages += run.new_pages
        assert len(set(state.pages)) == len(state.pages), "a page is twice in a table"
        assert all(0 <= page < len(self._slots) for page in state.pages), "no such page"
        if state.num_computed < 0:
            assert run.start % self._page_size == 0, "a prefix hit ends inside a page"
            state.num_computed = run.start
        assert run.num_tokens > 0, "an empty run"
        start = run.start
        if run.samples:
            start = len(state.tokens) + run.num_draft_tokens - run.num_tokens
            moved = (sum(state.rejected[:num]) for num in range(self._max_steps_ahead + 1))
            assert run.start - start in moved, "a run goes beyond the known tokens"
        else:
            assert start + run.num_tokens < len(state.tokens), "samples is wrong"
            assert run.num_draft_tokens == run.num_next_drafts == 0, "drafts without a sample"
            assert run.allowed_tokens is None, "a mask without a sample"
        assert start == state.num_computed, "a run does not follow the one before"
        last = run.start + run.num_tokens + max(0, run.num_next_drafts - 1)
        assert last <= len(state.pages) * self._page_size, "the page table is too short"
        if run.allowed_tokens is not None:
            assert len(run.allowed_tokens) == 1 + run.num_draft_tokens, "not a mask a draw"
        return start

    def _check_sharing(self) -> None:
        """A page in two tables must be full, computed by both and of the same content."""
        seen: dict[int, int] = {}
        for state in self._states.values():
            for i, page in enumerate(state.pages):
                end = (i + 1) * self._page_size
                if page not in seen:
                    whole = end <= state.num_computed
                    seen[page] = state.hashes[end - 1] if whole else -1
                    continue
                assert seen[page] != -1, f"page {page} is shared while one still writes it"
                assert end <= state.num_computed, f"page {page} is written while shared"
                assert seen[page] == state.hashes[end - 1], f"page {page} shared wrongly"

    def _write(self, run: ScheduledSequence, start: int) -> None:
        state = self._states[run.seq_id]
        for position in range(start):
            assert self._slot(state, position) == state.hashes[position], (
                f"sequence {run.seq_id} would read wrong KV at position {position}"
            )
        hashes = list(state.hashes)
        if run.num_draft_tokens:
            for draft in state.drafts[: run.num_draft_tokens]:
                hashes.append(mix(hashes[-1], draft))
            hashes += [-1] * (run.num_draft_tokens - len(state.drafts))
        for position in range(start, start + run.num_tokens):
            self._fill(state, position, hashes[position])
        state.num_computed = start + run.num_tokens
        self.num_computed_tokens += run.num_tokens

    def _slot(self, state: _State, position: int) -> int | None:
        size = self._page_size
        return self._slots[state.pages[position // size]][position % size]

    def _fill(self, state: _State, position: int, content: int) -> None:
        size = self._page_size
        self._slots[state.pages[position // size]][position % size] = content

    def _output(self, run: ScheduledSequence, start: int) -> SequenceOutput:
        state, script = self._states[run.seq_id], self.script
        end = min(start + run.num_tokens, len(state.tokens))
        is_poisoned = script.poison in state.tokens[start:end]
        prompt_logprobs = () if is_poisoned else self._score_prompt(state, start, end)
        if not run.samples:
            error = "non-finite logits" if is_poisoned else None
            return SequenceOutput(run.seq_id, prompt_logprobs=prompt_logprobs, error=error)
        drafts = state.drafts[: run.num_draft_tokens]
        sampled = [] if is_poisoned else self._verify(state, run, drafts)
        state.rejected.insert(0, 1 + run.num_draft_tokens - len(sampled))
        state.num_computed = min(state.num_computed, len(state.tokens) - 1)
        state.drafts = []
        if is_poisoned:
            return SequenceOutput(run.seq_id, error="non-finite logits")
        if run.num_next_drafts:
            last = len(state.tokens) - 1
            state.drafts = script.drafts(
                state.new, state.tokens, state.hashes[-1], run.num_next_drafts
            )
            for position in range(last, last + run.num_next_drafts - 1):
                self._fill(state, position, -2)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if state.new.params.logprobs is not None:
            first = len(state.tokens) - len(sampled)
            logprobs = tuple(self._score(state, first + i) for i in range(len(sampled)))
        return SequenceOutput(
            run.seq_id,
            tuple(sampled),
            logprobs,
            prompt_logprobs,
            num_draft_tokens=len(drafts),
            draft_token_ids=tuple(state.drafts),
        )

    def _verify(self, state: _State, run: ScheduledSequence, drafts: list[int]) -> list[int]:
        """Draw behind the last token and behind each draft that was right."""
        script, sampled = self.script, []
        masks = run.allowed_tokens
        bursts = script.burst(state.hashes[-1], None if masks is None else masks[0])
        for row in range(max(bursts, 1 + len(drafts))):
            allowed = None if masks is None else masks[row]
            token_id = script.token(state.new, len(state.tokens), state.hashes[-1], allowed)
            state.tokens.append(token_id)
            state.hashes.append(mix(state.hashes[-1], token_id))
            sampled.append(token_id)
            is_right = row < len(drafts) and token_id == drafts[row]
            if token_id == script.poison or not (is_right or row + 1 < bursts):
                break
        return sampled

    def _score_prompt(self, state: _State, start: int, end: int) -> tuple[TokenLogprobs, ...]:
        """Position p is scored by the step that computes p - 1; position 0 never is."""
        wanted_from = state.new.prompt_logprobs_from
        if wanted_from is None:
            return ()
        first = max(start + 1, wanted_from)
        last = min(end, state.new.num_prompt_tokens - 1)
        return tuple(self._score(state, position) for position in range(first, last + 1))

    def _score(self, state: _State, position: int) -> TokenLogprobs:
        value = -float(state.hashes[position - 1] % 1000) / 100.0
        return TokenLogprobs((state.tokens[position],), (value,), (1,))
