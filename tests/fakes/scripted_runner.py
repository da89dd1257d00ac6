"""A Runner without a model: tokens come from a hash, and every contract of core.step is asserted.

A sampled token depends on (seed, sample index, all tokens before it) and nothing else, so any two
schedulings of a request must give the same tokens. The KV memory is modelled slot by slot: a slot
holds the hash of the token prefix whose KV it stands for, and each run checks the whole context
it would attend to. A page that is shared wrongly, freed too early or reused too soon is found at
the first step that would read it.
"""

from dataclasses import dataclass, field

from tests.fakes.fake_mover import FakeMover

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

    max_burst > 1: a sample gives 1 to max_burst tokens, as verified drafts would.
    """

    vocab_size: int = 50
    poison: int | None = None
    max_burst: int = 1

    def token(
        self, new: NewSequence, num_tokens: int, prefix_hash: int, allowed: bytes | None
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


@dataclass
class _State:
    new: NewSequence
    tokens: list[int]
    hashes: list[int]
    pages: list[int] = field(default_factory=list)
    num_computed: int = -1
    """-1 until its first run says how much of it came from the prefix cache"""


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
    ) -> None:
        self._mover = mover
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
        for run in schedule.sequences:
            self._check_run(run)
        self._check_sharing()
        for run in schedule.sequences:
            self._write(run)
        return StepOutput(schedule.step_id, tuple(self._output(r) for r in schedule.sequences))

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

    def _check_run(self, run: ScheduledSequence) -> None:
        state = self._states[run.seq_id]
        state.pages += run.new_pages
        assert len(set(state.pages)) == len(state.pages), "a page is twice in a table"
        assert all(0 <= page < len(self._slots) for page in state.pages), "no such page"
        if state.num_computed < 0:
            assert run.start % self._page_size == 0, "a prefix hit ends inside a page"
            state.num_computed = run.start
        end = run.start + run.num_tokens
        assert run.num_tokens > 0, "an empty run"
        assert run.start == state.num_computed, "a run does not follow the one before"
        assert end <= len(state.tokens), "a run goes beyond the known tokens"
        assert end <= len(state.pages) * self._page_size, "the page table is too short"
        assert run.samples == (end == len(state.tokens)), "samples is wrong"
        assert run.allowed_tokens is None or run.samples, "a mask without a sample"

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

    def _write(self, run: ScheduledSequence) -> None:
        state = self._states[run.seq_id]
        size = self._page_size
        for position in range(run.start):
            slot = self._slots[state.pages[position // size]][position % size]
            assert slot == state.hashes[position], (
                f"sequence {run.seq_id} would read wrong KV at position {position}"
            )
        for position in range(run.start, run.start + run.num_tokens):
            self._slots[state.pages[position // size]][position % size] = state.hashes[position]
        state.num_computed = run.start + run.num_tokens
        self.num_computed_tokens += run.num_tokens

    def _output(self, run: ScheduledSequence) -> SequenceOutput:
        state, script = self._states[run.seq_id], self.script
        end = run.start + run.num_tokens
        if script.poison in state.tokens[run.start : end]:
            return SequenceOutput(run.seq_id, error="non-finite logits")
        prompt_logprobs = self._score_prompt(state, run.start, end)
        if not run.samples:
            return SequenceOutput(run.seq_id, prompt_logprobs=prompt_logprobs)
        sampled: list[int] = []
        allowed = None if run.allowed_tokens is None else run.allowed_tokens[0]
        for _ in range(script.burst(state.hashes[-1], allowed)):
            token_id = script.token(state.new, len(state.tokens), state.hashes[-1], allowed)
            state.tokens.append(token_id)
            state.hashes.append(mix(state.hashes[-1], token_id))
            sampled.append(token_id)
            if token_id == script.poison:
                break
        first = len(state.tokens) - len(sampled)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if state.new.params.logprobs is not None:
            logprobs = tuple(self._score(state, first + i) for i in range(len(sampled)))
        return SequenceOutput(run.seq_id, tuple(sampled), logprobs, prompt_logprobs)

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
