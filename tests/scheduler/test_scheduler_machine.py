"""The scheduler under random use: right tokens, no page lost, no budget exceeded, nobody starves.

The scripted runner and Loop.check assert the page and budget rules in every step; here are the
inputs that stress them, and what must hold over time.
"""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.fakes.scripted_runner import Script
from tests.scheduler.loop import Loop, expected, make_request

from moestro.core.grammar import GrammarSpec
from moestro.core.request import FinishReason, Request
from moestro.core.step import Schedule
from moestro.scheduler.lookahead import future_len

POISON = 29
EOS = 28
VOCAB = 30
MAX_TOKENS = 12
FAMILIES = ([1] * 40, [1, 2] * 20, [3, 1, 2] * 14)


@st.composite
def prompts(draw: st.DrawFn, longest: int) -> list[int]:
    """Few beginnings and few endings, so that prefixes are shared at all lengths."""
    family = draw(st.sampled_from(FAMILIES))
    length = draw(st.integers(1, longest))
    ending = draw(st.lists(st.sampled_from([4, 5, 5, 5, POISON]), max_size=2))
    return (family[:length] + ending)[-longest:]


@st.composite
def sampling(draw: st.DrawFn) -> dict[str, object]:
    max_tokens = draw(st.integers(1, MAX_TOKENS))
    options: dict[str, object] = {
        "max_tokens": max_tokens,
        "n": draw(st.sampled_from([1, 1, 2, 3])),
        "seed": draw(st.integers(0, 3)),
        "priority": draw(st.integers(-1, 1)),
        "cache_salt": draw(st.sampled_from(["", "", "tenant"])),
        "eos_token_ids": (EOS,),
        "ignore_eos": draw(st.booleans()),
        "stop_token_ids": draw(st.sampled_from([(), (1, 2, 3), tuple(range(15))])),
        "min_tokens": draw(st.integers(0, max_tokens)) if draw(st.booleans()) else 0,
        "prompt_logprobs": draw(st.sampled_from([None, None, 0])),
        "logprobs": draw(st.sampled_from([None, 0])),
    }
    if draw(st.integers(0, 4)) == 0:
        source = " ".join(["6|7|8|9", "10|11", "12"][: draw(st.integers(1, 3))])
        options["grammar"] = GrammarSpec("scripted", source)
    return options


@dataclass
class Cut:
    """A sequence that was ended from outside: its output may stop anywhere."""

    num_tokens: int | None = None


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.integers(1, 5),
        num_pages=st.sampled_from([3, 4, 5, 7, 10, 80]),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 14),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.sampled_from([True, True, True, False]),
        max_steps_ahead=st.sampled_from([0, 1, 1, 2]),
        num_drafts=st.sampled_from([0, 1, 3, 7]),
        acceptance=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    )
    def start(
        self,
        page_size: int,
        num_pages: int,
        max_num_seqs: int,
        budget: int,
        policy: str,
        caching: bool,
        max_steps_ahead: int,
        num_drafts: int,
        acceptance: float,
    ) -> None:
        self.loop = Loop(
            num_pages=num_pages,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=40,
            policy=policy,
            enable_prefix_caching=caching,
            script=Script(VOCAB, POISON, acceptance=acceptance),
            max_steps_ahead=max_steps_ahead,
            num_drafts=num_drafts,
        )
        self.max_num_seqs = max_num_seqs
        self.is_roomy = num_pages == 80
        self.requests: dict[str, Request] = {}
        self.cut: dict[tuple[str, int], Cut] = {}
        self.steps_without: dict[int, int] = {}

    @rule(data=st.data(), options=sampling())
    def add(self, data: st.DataObject, options: dict) -> None:
        longest = min(20, self.loop.kv.capacity_tokens)
        name = f"r{len(self.requests)}"
        request = make_request(name, data.draw(prompts(longest)), **options)
        self.requests[name] = request
        self.loop.add(request)

    @precondition(lambda self: self.loop.can_plan)
    @rule()
    def plan(self) -> None:
        schedule = self.loop.plan()
        if schedule is not None:
            self.check_turns(schedule)

    @precondition(lambda self: self.loop.can_execute)
    @rule()
    def execute(self) -> None:
        self.loop.execute()

    @precondition(lambda self: self.loop.open)
    @rule()
    def finish_step(self) -> None:
        self.loop.finish_step(self.loop.open[0])

    @rule(num_steps=st.integers(1, 6))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            while self.loop.can_plan:
                num_open = len(self.loop.open)
                self.plan()
                if len(self.loop.open) == num_open:
                    break
            if self.loop.open:
                self.finish_step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        for seq in self.loop.scheduler.abort(name):
            self.cut[name, seq.index] = Cut()
        self.loop.check()

    @precondition(lambda self: self.loop.scheduler._roster.live)
    @rule(data=st.data(), keep=st.integers(0, 3))
    def finish_from_outside(self, data: st.DataObject, keep: int) -> None:
        live = self.loop.scheduler._roster.live
        seq = live[data.draw(st.sampled_from(sorted(live)))]
        if seq.num_output_tokens:
            keep = min(keep, seq.num_output_tokens)
            self.loop.scheduler.finish(seq.seq_id, FinishReason.STOP, "stop", keep)
            self.cut[seq.request.request_id, seq.index] = Cut()
            assert seq.num_output_tokens == keep

    def check_turns(self, schedule: Schedule) -> None:
        """The first of the running ones, and with room for all every decode row, gets its turn."""
        if schedule.sequences == ():
            return
        planned = {run.seq_id: run for run in schedule.sequences}
        running = self.loop.scheduler._roster.running
        waited = {}
        for place, seq in enumerate(running):
            ready = future_len(seq) - seq.num_computed_tokens == 1
            if seq.num_runs_in_flight:
                continue  # it goes on, and may be about to end
            if seq.seq_id not in planned and (place == 0 or (self.is_roomy and ready)):
                waited[seq.seq_id] = self.steps_without.get(seq.seq_id, 0) + 1
                assert waited[seq.seq_id] <= 2 * self.max_num_seqs + 4, "a sequence starves"
        self.steps_without = waited

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.loop.run(self.max_steps_left())
        self.settle()
        assert self.loop.scheduler.stats().num_pages_used == 0
        for request in self.requests.values():
            for index in range(request.params.n):
                self.check_result(request, index)

    def settle(self) -> None:
        """Let what goes on without requests come to its end."""

    def max_steps_left(self) -> int:
        """Steps in which everything must be done.

        The first of the live sequences in the policy's order is admitted when those that run
        are done, at most max_num_seqs of them; it is never preempted, gets a token in every
        `turn` steps, and has at most `longest` of them. Then the same holds for the next one.
        """
        turn = 2 * self.max_num_seqs + 5
        longest = 20 + 2 + MAX_TOKENS
        return (
            (len(self.loop.scheduler._roster.live) + 1) * (self.max_num_seqs + 1) * longest * turn
        )

    def check_result(self, request: Request, index: int) -> None:
        want = expected(request, index, self.loop.runner.script, self.loop.max_len)
        got = self.loop.results[request.request_id, index]
        if (request.request_id, index) in self.cut:
            assert got.token_ids == want.token_ids[: len(got.token_ids)]
            return
        assert got.token_ids == want.token_ids
        assert (got.finish_reason, got.stop_reason) == (want.finish_reason, want.stop_reason)
        if request.params.logprobs is not None:
            assert len(got.logprobs) == len(got.token_ids)
            assert [entry.token_ids[0] for entry in got.logprobs] == got.token_ids
        if index == 0 and request.params.prompt_logprobs is not None and got.error is None:
            scored = [entry.token_ids[0] for entry in got.prompt_logprobs]
            assert scored == list(request.prompt_token_ids[1:])
            assert got.num_cached_tokens == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=40)
