"""The engine loop in miniature, and what a request must give whatever the scheduler does."""

from array import array
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fakes.fake_mover import FakeMover
from tests.fakes.scripted_matcher import compile_script
from tests.fakes.scripted_runner import Script, ScriptedRunner, mix, prefix_hashes

from moestro.core.grammar import GrammarMatcher
from moestro.core.request import FinishReason, Request
from moestro.core.sampling_params import SamplingParams
from moestro.core.step import NewSequence, Schedule, StepOutput, TokenLogprobs
from moestro.kvcache import KVCacheManager
from moestro.kvcache.run import Run
from moestro.kvcache.tier_policy import TierConfig
from moestro.scheduler import FixedDrafts, Scheduler, SchedulerLimits, SequenceUpdate


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    max_tokens: int = 8,
    stop_token_ids: tuple[int, ...] = (),
    eos_token_ids: tuple[int, ...] = (),
    seed: int = 0,
    priority: int = 0,
    cache_salt: str = "",
    **params: object,
) -> Request:
    """A request as the input processor would make it."""
    sampling = SamplingParams(
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        **params,  # type: ignore[arg-type]
    )
    eos = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=sampling,
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=eos | set(stop_token_ids),
        eos_token_ids=frozenset(eos_token_ids),
        priority=priority,
        cache_salt=cache_salt,
    )


@dataclass
class Result:
    """Everything one sequence has given."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0


class Loop:
    """Scheduler and scripted runner, with every invariant checked after each step.

    open: planned and not updated yet, oldest first. Execution may come any time between.
    """

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_model_len: int = 200,
        policy: str = "fcfs",
        enable_prefix_caching: bool = True,
        script: Script | None = None,
        mover: FakeMover | None = None,
        tiers: TierConfig | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        max_steps_ahead: int = 0,
        num_drafts: int = 0,
    ) -> None:
        self.max_len = min(max_model_len, num_pages * page_size + 1)
        self.kv = KVCacheManager(
            num_pages, page_size, enable_prefix_caching, mover=mover, tiers=tiers, clock=clock
        )
        self.runner = ScriptedRunner(
            num_pages,
            page_size,
            script,
            max_num_seqs,
            max_num_batched_tokens,
            mover,
            max_steps_ahead,
        )
        self.mover = mover
        self.max_steps_ahead = max_steps_ahead
        self.open: deque[Schedule] = deque()
        self._unexecuted: deque[Schedule] = deque()
        self._outputs: dict[int, StepOutput] = {}
        self.scheduler = Scheduler(
            SchedulerLimits(max_num_seqs, max_num_batched_tokens, max_model_len, max_steps_ahead),
            self.kv,
            policy,
            compile_script,
            self.runner.script.vocab_size,
            FixedDrafts(num_drafts) if num_drafts else None,
        )
        self.results: dict[tuple[str, int], Result] = defaultdict(Result)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def plan(self) -> Schedule | None:
        schedule = self.scheduler.schedule()
        if schedule is not None:
            self.open.append(schedule)
            self._unexecuted.append(schedule)
        return schedule

    @property
    def can_plan(self) -> bool:
        return len(self.open) <= self.max_steps_ahead

    @property
    def can_execute(self) -> bool:
        return bool(self._unexecuted)

    def execute(self) -> None:
        """The device does the next step."""
        schedule = self._unexecuted.popleft()
        self._outputs[schedule.step_id] = self.runner.execute(schedule)

    def finish_step(self, schedule: Schedule) -> list[SequenceUpdate]:
        """Take in the output of the oldest open step."""
        assert schedule is self.open.popleft()
        while schedule.step_id not in self._outputs:
            self.execute()
        updates = self.scheduler.update(schedule, self._outputs.pop(schedule.step_id))
        for update in updates:
            self._take(update)
        self.check()
        return updates

    def step(self) -> Schedule | None:
        """Plan what may be planned and finish the oldest; None when there is nothing open."""
        while self.can_plan and self.plan() is not None:
            pass
        if not self.open:
            return None
        oldest = self.open[0]
        self.finish_step(oldest)
        return oldest

    def run(self, max_steps: int = 10_000) -> int:
        """Step until no work is left; how many steps that took, waits for moves among them."""
        for num_steps in range(max_steps):
            if self.step() is None:
                if not self.scheduler.has_work():
                    return num_steps
                self.scheduler.wait(0.0)
        raise AssertionError(f"not finished after {max_steps} steps")

    def check(self) -> None:
        """Pages and counters agree with the live sequences."""
        roster = self.scheduler._roster
        self.kv.check(list(roster.live.values()))
        assert len(roster.running) + roster.num_waiting == len(roster.live)
        assert all(not seq.pages for seq in roster.live.values() if seq not in roster.running)
        tenants: dict[int, str] = {}
        for seq in roster.running:
            for page in seq.pages:
                salt = seq.request.cache_salt
                assert tenants.setdefault(page, salt) == salt, "a page is shared across tenants"
        self._check_published()

    def _check_published(self) -> None:
        """Every page that others may find, on the device or the host, holds its tokens' KV."""
        size, ends = self.kv.page_size, {}
        slots = self.runner._slots

        def end_of(run: Run) -> int:
            if run.parent is None:
                return 1
            if run not in ends:
                state, hashes = end_of(run.parent), []
                for token_id in array("I", bytes(run.tokens)):
                    state = mix(state, token_id)
                    hashes.append(state)
                ends[run] = state
                wanted = [tuple(hashes[i : i + size]) for i in range(0, len(hashes), size)]
                if run.pages and not any(claim.on_device for claim in run.claims):
                    found = [tuple(slots[page]) for page in run.pages]
                    assert found == wanted, "a published page holds something else"
                if run.slots and self.mover is not None:
                    found = [self.mover.host[slot] for slot in run.slots]  # type: ignore[misc]
                    assert found == wanted, "a host slot holds something else"
            return ends[run]

        for run in self.kv._index.runs():
            end_of(run)

    def _take(self, update: SequenceUpdate) -> None:
        result = self.results[update.request_id, update.index]
        assert result.finish_reason is None, "an update after the end"
        result.token_ids += update.new_token_ids
        result.logprobs += update.logprobs
        result.prompt_logprobs += update.prompt_logprobs
        result.num_cached_tokens = update.num_cached_tokens
        result.finish_reason = update.finish_reason
        result.stop_reason = update.stop_reason
        result.error = update.error


def expected(request: Request, index: int, script: Script, max_len: int) -> Result:
    """What a sequence gives when it is alone in the world, one token after another."""
    result = Result()
    tokens = list(request.prompt_token_ids)
    new = NewSequence(
        0, (), len(tokens), request.params, request.seed, index, request.stop_token_ids
    )
    prefix = prefix_hashes(tokens)[-1]
    spec = request.params.grammar
    matcher = compile_script(spec, script.vocab_size) if spec else None
    if script.poison in tokens:
        result.finish_reason = FinishReason.ERROR
    while result.finish_reason is None:
        mask = None if matcher is None else _mask(matcher, request, script.vocab_size)
        if mask is not None and len(result.token_ids) < request.params.min_tokens:
            allowed = {t for t in range(script.vocab_size) if mask[t >> 3] >> (t & 7) & 1}
            if allowed <= request.stop_token_ids:
                result.finish_reason = FinishReason.ERROR
                break
        token_id = script.token(new, len(tokens), prefix, mask)
        tokens.append(token_id)
        prefix = mix(prefix, token_id)
        result.token_ids.append(token_id)
        can_stop = len(result.token_ids) > request.params.min_tokens
        if token_id in request.stop_token_ids and can_stop:
            result.finish_reason = FinishReason.STOP
            is_eos = token_id in request.eos_token_ids and not request.params.ignore_eos
            result.stop_reason = None if is_eos else token_id
        elif len(result.token_ids) == request.max_tokens or len(tokens) == max_len:
            result.finish_reason = FinishReason.LENGTH
        elif token_id == script.poison:
            result.finish_reason = FinishReason.ERROR
        elif matcher is not None and matcher.accept(token_id) and matcher.is_done():
            can_stop = len(result.token_ids) >= request.params.min_tokens
            if not (request.stop_token_ids and can_stop):
                result.finish_reason = FinishReason.STOP
    return result


def _mask(matcher: GrammarMatcher, request: Request, vocab_size: int) -> bytes:
    mask = bytearray((vocab_size + 7) // 8)
    if not matcher.is_done():
        matcher.fill_mask(mask)
        return bytes(mask)
    for token_id in request.stop_token_ids:
        mask[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(mask)
