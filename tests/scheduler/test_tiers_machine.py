"""The scheduler over three tiers whose moves end late, in part, out of order, or not at all.

The scripted runner and the fake mover model what every device page, host slot and stored page
stands for: a page that is freed, moved or named wrongly is found at the first step or move that
reads it. Loop.check asks after each step that everything has exactly one owner.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from tests.fakes.fake_mover import FakeMover
from tests.fakes.scripted_runner import Script
from tests.scheduler.loop import Loop
from tests.scheduler.test_scheduler_machine import POISON, VOCAB, SchedulerMachine, prompts

from moestro.core.kv_hints import HintAction, HintRequest, PrefixUse
from moestro.core.page_moves import MoveFailure
from moestro.kvcache.tier_policy import PINNED_PRIORITY, TierConfig, WritePolicy


@st.composite
def tier_configs(draw: st.DrawFn) -> TierConfig:
    low = draw(st.sampled_from([0.0, 0.4, 0.9]))
    return TierConfig(
        num_host_slots=draw(st.sampled_from([1, 4, 9, 60])),
        keeps_host=draw(st.sampled_from([True, True, False])),
        host_is_lossy=draw(st.sampled_from([False, False, True])),
        write_policy=draw(st.sampled_from(list(WritePolicy))),
        low_water=low,
        high_water=draw(st.sampled_from([max(low, 0.5), 1.0])),
        move_chunk_bytes=draw(st.integers(1, 4)),
        fetch_timeout_s=draw(st.sampled_from([0.0, 1.0, 5.0])),
    )


class TiersMachine(SchedulerMachine):
    @initialize(
        page_size=st.integers(1, 4),
        num_pages=st.sampled_from([4, 5, 7, 10, 80]),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(2, 14),
        policy=st.sampled_from(["fcfs", "priority"]),
        tiers=tier_configs(),
        max_moves=st.sampled_from([1, 3, 100]),
        store=st.sampled_from([True, True, False]),
        max_steps_ahead=st.sampled_from([0, 1, 1, 2]),
        num_drafts=st.sampled_from([0, 2, 5]),
    )
    def start(
        self,
        page_size: int,
        num_pages: int,
        max_num_seqs: int,
        budget: int,
        policy: str,
        tiers: TierConfig,
        max_moves: int,
        store: bool,
        max_steps_ahead: int,
        num_drafts: int,
    ) -> None:
        self.now_s = 0.0
        self.answers: list[PrefixUse] = []
        self.num_questions = 0
        self.mover = FakeMover(has_store=store, max_moves=max_moves)
        self.loop = Loop(
            num_pages=num_pages,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=40,
            policy=policy,
            script=Script(VOCAB, POISON),
            mover=self.mover,
            tiers=tiers,
            clock=lambda: self.now_s,
            max_steps_ahead=max_steps_ahead,
            num_drafts=num_drafts,
        )
        self.tiers = tiers
        self.max_num_seqs = max_num_seqs
        self.is_roomy = False
        self.requests = {}
        self.cut = {}
        self.steps_without = {}

    @precondition(lambda self: self.mover.queued)
    @rule(data=st.data())
    def finish_move(self, data: st.DataObject) -> None:
        """Any of them, all or a part of it, for whatever reason."""
        at = data.draw(st.integers(0, len(self.mover.queued) - 1))
        num_done = data.draw(st.sampled_from([None, None, 0, 1, 2]))
        failure = data.draw(st.sampled_from([f for f in MoveFailure if f.value != "missing"]))
        self.mover.finish(at, num_done, failure)

    @rule()
    def finish_all_moves(self) -> None:
        self.mover.finish_all()

    @rule(seconds=st.sampled_from([0.1, 1.0, 20.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.mover.has_store and self.mover.store)
    @rule(data=st.data())
    def lose_a_stored_page(self, data: st.DataObject) -> None:
        del self.mover.store[data.draw(st.sampled_from(sorted(self.mover.store)))]

    @rule()
    def get_a_store(self) -> None:
        self.mover.has_store = True

    @rule(
        action=st.sampled_from(list(HintAction)),
        tokens=prompts(20),
        salt=st.sampled_from(["", "tenant"]),
        ttl_s=st.sampled_from([0.0, 1.0, 30.0]),
    )
    def hint(self, action: HintAction, tokens: list[int], salt: str, ttl_s: float) -> None:
        """Pins, drops and prefetches come at any time; the answer adds up."""
        takes_ttl = action in (HintAction.PIN, HintAction.PREFETCH)
        request = HintRequest(
            action=action,
            token_ids=tuple(tokens),
            cache_salt=salt,
            ttl_s=ttl_s if takes_ttl else None,
        )
        answer = self.loop.kv.hint(request)
        assert answer.accepted + answer.requested + answer.clipped == len(tokens)
        assert (answer.refused is None) == (answer.accepted + answer.requested > 0)
        self.check_pins()

    @rule(tokens=prompts(20), salt=st.sampled_from(["", "tenant"]))
    def explain(self, tokens: list[int], salt: str) -> None:
        """Questions are answered once each, whatever the store does."""
        self.num_questions += 1
        self.loop.kv.explain(tokens, salt, self.answers.append)
        self.loop.check()

    def check_pins(self) -> None:
        """Within their quota, and last in both eviction orders."""
        sessions = self.loop.kv._desk.sessions
        capacity = max(self.loop.kv.num_pages, self.tiers.num_host_slots)
        assert sessions.num_pinned_pages <= capacity // 2
        for pin in sessions._pins.values():
            assert pin.num_pages == sum(run.num_pages for run in pin.claim.runs)
            assert all(run.priority == PINNED_PRIORITY for run in pin.claim.runs)
        for order in (self.loop.kv._index.device, self.loop.kv._index.host):
            priorities = [run.priority for run in order]
            assert priorities == sorted(priorities)

    @rule()
    def tend(self) -> None:
        self.loop.scheduler.tend()
        self.loop.check()
        self.check_pins()
        host = self.loop.kv._below.host
        if not self.tiers.keeps_host:
            assert host.order.num_pages == 0, "a staging area keeps what nobody needs"

    def drain(self) -> None:
        while self.loop.scheduler.tend() or self.mover.queued:
            self.mover.finish_all()

    def settle(self) -> None:
        self.drain()
        self.loop.check()
        below = self.loop.kv._below
        assert below.fetcher.claimed() == []
        assert len(self.answers) == self.num_questions
        self.now_s += 100.0
        self.drain()  # pins run out, old news of the store is renewed
        assert all(not run.claims for run in self.loop.kv._index.runs())
        if self.tiers.host_is_lossy:
            assert not self.mover.store

    def max_steps_left(self) -> int:
        return super().max_steps_left() * 3 + 200


TestTiersMachine = TiersMachine.TestCase
TestTiersMachine.settings = settings(max_examples=120, stateful_step_count=40)
