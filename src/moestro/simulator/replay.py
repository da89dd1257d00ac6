"""Replay: a trace through the real Scheduler and KVCacheManager in a closed loop, without a model.

So many lanes, each a client that goes through one session after the other: it asks, waits for the
answer, thinks as long as the trace says, asks again.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from moestro.core.kv_hints import KVHints
from moestro.core.request import Request, Sequence
from moestro.core.sampling_params import SamplingParams
from moestro.core.step import Schedule
from moestro.errors import CapacityError, ConfigError
from moestro.kvcache.manager import KVCacheManager
from moestro.kvcache.tier_policy import TierConfig
from moestro.scheduler import Scheduler, SchedulerLimits, SequenceUpdate
from moestro.simulator.clock import VirtualClock
from moestro.simulator.sim_mover import MoveCosts, VirtualMover
from moestro.simulator.sim_runner import StepCosts, VirtualRunner
from moestro.simulator.workload import PromptWriter, Session, TracedRequest, Workload

_NO_LIMIT = 1 << 40
_STEP_TOKENS = 16_384
_IDLE_WAIT_S = 1.0
_PAGES_PER_MOVE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """How the trace is asked. gap_cap_s: the longest think time. pin_ttl_s: with hints, how long
    a session's KV is pinned after each answer; its last request drops it. None: no hints."""

    num_lanes: int = 16
    gap_cap_s: float = 60.0
    pin_ttl_s: float | None = None

    def __post_init__(self) -> None:
        if self.num_lanes < 1:
            raise ConfigError(f"The number of lanes must be at least 1, got {self.num_lanes}.")
        if not 0 <= self.gap_cap_s < math.inf:
            raise ConfigError(f"The gap cap must be 0 s or more, got {self.gap_cap_s}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the tiers hold, in pages; 0: no such tier."""

    device_pages: int
    host_pages: int = 0
    store_pages: int = 0


@dataclass(slots=True)
class ReplayResult:
    """Tokens over all requests, first admissions only. refused: prompts beyond the device tier.

    served: (scope, request, ends) in the order of admissions and ends. virtual_s: by the replay's
    clock. num_pages: of prompts and outputs together, as often as they were asked for.
    """

    num_requests: int = 0
    num_refused: int = 0
    queries_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    store_tokens: int = 0
    num_preemptions: int = 0
    num_prefill_tokens: int = 0
    num_pages: int = 0
    num_steps: int = 0
    virtual_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    served: list[tuple[int, TracedRequest, bool]] = field(default_factory=list)


@dataclass(slots=True)
class _Lane:
    """A client and where it is in its session."""

    session: Session
    writer: PromptWriter
    at: int = 0

    @property
    def request(self) -> TracedRequest:
        return self.session.requests[self.at]


@dataclass(slots=True)
class _Asked:
    lane: _Lane
    seq: Sequence
    at_s: float
    is_served: bool = False
    has_token: bool = False


class Replay:
    """One capacity point. `advance` is called for each request that is done."""

    def __init__(
        self,
        workload: Workload,
        capacity: Capacity,
        clients: Clients,
        costs: StepCosts,
        moves: MoveCosts,
        page_size: int = 64,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        self.result = ReplayResult()
        self._workload = workload
        self._clients = clients
        self._page_size = page_size
        self._advance = advance
        self._clock = VirtualClock()
        self._runner = VirtualRunner(self._clock, costs)
        self._kv = _manager(capacity, page_size, self._clock, moves, costs.page_bytes)
        limits = SchedulerLimits(clients.num_lanes, _STEP_TOKENS, _NO_LIMIT)
        self._scheduler = Scheduler(limits, self._kv)
        self._sessions = iter(workload.sessions)
        self._due: list[tuple[float, int, _Lane]] = []  # heap: when, tie-break, who
        self._num_asked = 0
        self._asked: dict[int, _Asked] = {}

    def run(self) -> ReplayResult:
        """Until every session has had every answer."""
        for _ in range(self._clients.num_lanes):
            self._next_session()
        while self._due or self._scheduler.has_work():
            self._ask_all_due()
            schedule = self._scheduler.schedule()
            if schedule is None:
                self._pass_time()
            else:
                self._step(schedule)
        result = self.result
        result.virtual_s = self._clock.now_s
        result.num_prefill_tokens = self._runner.num_prefill_tokens
        stats = self._scheduler.stats()
        result.num_preemptions, result.num_steps = stats.num_preemptions, stats.num_steps
        return result

    def _pass_time(self) -> None:
        """Nothing to compute: until a move ends or somebody asks."""
        until_due = self._due[0][0] - self._clock.now_s if self._due else math.inf
        before = self._clock.now_s
        if self._scheduler.tend() or self._scheduler.has_work():
            self._scheduler.wait(min(_IDLE_WAIT_S, until_due))
        elif self._due:
            self._clock.advance(until_due)
        if self._clock.now_s == before:
            self._clock.advance(min(_IDLE_WAIT_S, until_due))

    def _step(self, schedule: Schedule) -> None:
        for new in schedule.new_sequences:
            self._note_served(self._asked[new.seq_id])
        self._runner.horizon_s = self._due[0][0] if self._due else math.inf
        began_s, num_prefilled = self._clock.now_s, self._runner.num_prefill_tokens
        output = self._runner.execute(schedule)
        for update in self._scheduler.update(schedule, output):
            self._note(update)
        # Tokens that were sampled several at a time are no measure of how fast prompts go.
        if 2 * (self._runner.num_prefill_tokens - num_prefilled) > schedule.num_tokens:
            self._scheduler.note_step(schedule, self._clock.now_s - began_s)

    def _note_served(self, asked: _Asked) -> None:
        if not asked.is_served:
            asked.is_served = True
            self.result.served.append((asked.lane.session.scope, asked.lane.request, False))

    def _note(self, update: SequenceUpdate) -> None:
        asked = self._asked[update.seq_id]
        if not asked.has_token:
            asked.has_token = True
            self.result.ttft_s.append(self._clock.now_s - asked.at_s)
        if update.finish_reason is not None:
            del self._asked[update.seq_id]
            self._count(asked)
            self._go_on(asked.lane)

    def _count(self, asked: _Asked) -> None:
        result, request, found = self.result, asked.lane.request, asked.seq.prefix
        result.num_requests += 1
        result.served.append((asked.lane.session.scope, request, True))
        result.queries_tokens += request.input_len
        result.device_tokens += found.device_tokens
        result.host_tokens += found.host_tokens
        result.store_tokens += found.store_tokens
        result.num_pages += -(-len(asked.seq.token_ids) // self._page_size)

    def _next_session(self) -> None:
        session = next(self._sessions, None)
        if session is not None:
            lane = _Lane(session, PromptWriter(session.scope, self._workload.block_size))
            self._ask_later(lane, lane.request.gap_s)

    def _go_on(self, lane: _Lane) -> None:
        self._advance()
        lane.at += 1
        if lane.at < len(lane.session.requests):
            self._ask_later(lane, lane.request.gap_s)
        else:
            self._next_session()

    def _ask_later(self, lane: _Lane, gap_s: float) -> None:
        at_s = self._clock.now_s + min(gap_s, self._clients.gap_cap_s)
        heapq.heappush(self._due, (at_s, self._num_asked, lane))
        self._num_asked += 1

    def _ask_all_due(self) -> None:
        while self._due and self._due[0][0] <= self._clock.now_s:
            at_s, _, lane = heapq.heappop(self._due)
            try:
                (seq,) = self._scheduler.add(self._request(lane))
            except CapacityError:
                self.result.num_refused += 1
                self._go_on(lane)
                continue
            self._asked[seq.seq_id] = _Asked(lane, seq, at_s)

    def _request(self, lane: _Lane) -> Request:
        request = lane.request
        if request.input_len > self._kv.capacity_tokens:
            raise CapacityError(f"A prompt of {request.input_len} tokens does not fit.")
        return Request(
            request_id=str(request.number),
            prompt_token_ids=lane.writer.write(request),
            params=SamplingParams(
                temperature=0.0, max_tokens=request.output_len, detokenize=False, ignore_eos=True
            ),
            seed=request.number,
            max_tokens=request.output_len,
            kv_hints=self._hints(lane),
        )

    def _hints(self, lane: _Lane) -> KVHints | None:
        ttl_s, name = self._clients.pin_ttl_s, lane.session.name
        if ttl_s is None:
            return None
        if lane.at + 1 < len(lane.session.requests):
            return KVHints(session_id=name, pin_ttl_s=ttl_s)
        return KVHints(session_id=name, drop_on_finish=True)


def _manager(
    capacity: Capacity, page_size: int, clock: VirtualClock, moves: MoveCosts, page_bytes: int
) -> KVCacheManager:
    if not (capacity.host_pages or capacity.store_pages):
        return KVCacheManager(capacity.device_pages, page_size, clock=clock)
    mover = VirtualMover(clock, moves, page_bytes, capacity.store_pages)
    tiers = TierConfig(
        num_host_slots=capacity.host_pages or max(1, capacity.device_pages // 8),
        keeps_host=capacity.host_pages > 0,
        move_chunk_bytes=_PAGES_PER_MOVE * page_bytes,
    )
    return KVCacheManager(capacity.device_pages, page_size, mover=mover, tiers=tiers, clock=clock)
