"""OfflineLRU against an LRU that is played page by page, and against the published figures."""

from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.simulator.offline_lru import HeldLRU, OfflineLRU
from moestro.simulator.workload import TracedRequest, load_workload

TRACES = Path(__file__).parents[2] / "bench" / "traces"


class PlayedLRU:
    """Obviously right, and slow: a dict of pages in the order of their last use."""

    def __init__(self, capacity: int, page_size: int, block_size: int) -> None:
        self.capacity, self.page_size = capacity, page_size
        self.pages_per_block = block_size // page_size
        self.pages: OrderedDict[tuple, None] = OrderedDict()
        self.hits_tokens = 0

    def begin(self, scope: int, request: TracedRequest) -> None:
        for name in self.names(scope, request)[: (request.input_len - 1) // self.page_size]:
            if name not in self.pages:
                break
            self.hits_tokens += self.page_size
        self.use(scope, request, request.input_len)

    def end(self, scope: int, request: TracedRequest) -> None:
        self.use(scope, request, request.input_len + request.output_len - 1)

    def names(self, scope: int, request: TracedRequest) -> list[tuple]:
        return [
            (scope, block, page)
            for first, last in request.blocks
            for block in range(first, last + 1)
            for page in range(self.pages_per_block)
        ]

    def use(self, scope: int, request: TracedRequest, num_tokens: int) -> None:
        names = self.names(scope, request)
        num_own = num_tokens // self.page_size - len(names)
        names += [(scope, "own", request.number, page) for page in range(num_own)]
        for name in reversed(names):
            self.pages[name] = None
            self.pages.move_to_end(name)
            if len(self.pages) > self.capacity:
                self.pages.popitem(last=False)


@st.composite
def chained_requests(draw: st.DrawFn) -> list[tuple[int, TracedRequest]]:
    """Requests over two scopes that extend, repeat and branch off one another."""
    paths: dict[int, list[list[int]]] = {0: [[]], 1: [[]]}
    next_id = 0
    requests = []
    for number in range(draw(st.integers(1, 25))):
        scope = draw(st.integers(0, 1))
        base = draw(st.sampled_from(paths[scope]))
        path = base[: draw(st.integers(0, len(base)))]
        for _ in range(draw(st.integers(0, 4))):
            path = [*path, next_id]
            next_id += draw(st.sampled_from((1, 1, 1, 5)))
        next_id += 1
        paths[scope].append(path)
        input_len = len(path) * 4 + draw(st.integers(0, 5))
        if input_len:
            blocks = tuple((i, i) for i in path)
            output_len = draw(st.integers(1, 6))
            requests.append((scope, TracedRequest(number, blocks, input_len, output_len, 0.0)))
    return requests


@given(chained_requests(), st.sampled_from((2, 4)), st.integers(1, 5))
def test_equals_an_lru_played_page_by_page(
    requests: list[tuple[int, TracedRequest]], page_size: int, num_at_once: int
) -> None:
    capacities = (1, 2, 3, 5, 8, 13, 10_000)
    offline = OfflineLRU(capacities, page_size, 4)
    played = [PlayedLRU(capacity, page_size, 4) for capacity in capacities]
    for at, (scope, request) in enumerate(requests):
        for lru in (offline, *played):
            lru.begin(scope, request)
            if at + 1 >= num_at_once:
                lru.end(*requests[at + 1 - num_at_once])
    assert offline.hits_tokens == [lru.hits_tokens for lru in played]
    assert offline.ideal_hits_tokens == offline.hits_tokens[-1]
    assert offline.queries_tokens == sum(r.input_len for _, r in requests)


def test_equals_it_on_real_requests() -> None:
    workload = load_workload(TRACES / "mooncake" / "conversation_trace.jsonl.gz").limited(400, None)
    capacities = (1000, 20_000, 60_000)
    offline = OfflineLRU(capacities, 64, 512)
    played = [PlayedLRU(capacity, 64, 512) for capacity in capacities]
    for session in workload.sessions:
        for lru in (offline, *played):
            lru.begin(session.scope, session.requests[0])
            lru.end(session.scope, session.requests[0])
    assert offline.hits_tokens == [lru.hits_tokens for lru in played]
    assert offline.hits_tokens[0] > 0


@given(chained_requests(), st.sampled_from((2, 4)))
def test_held_lru_is_a_plain_one_when_nothing_overlaps(
    requests: list[tuple[int, TracedRequest]], page_size: int
) -> None:
    capacity = (
        max((r.input_len + r.output_len) // page_size for _, r in requests) if requests else 1
    )
    plain = PlayedLRU(capacity, page_size, 4)
    held = HeldLRU(capacity, page_size, 4, every=1)
    for scope, request in requests:
        for lru in (plain, held):
            lru.begin(scope, request)
            lru.end(scope, request)
    assert held.hits_tokens == plain.hits_tokens


def test_held_pages_stay_and_idle_ones_go() -> None:
    """Three prompts of 4 pages in 9: the first is held while the others come and go."""
    asked = [TracedRequest(n, ((10 * n, 10 * n + 3),), 17, 1, 0.0) for n in range(3)]
    again = [TracedRequest(10 + n, r.blocks, 17, 1, 0.0) for n, r in enumerate(asked)]
    plain, held = OfflineLRU([9], 4, 4), HeldLRU(9, 4, 4, every=1)
    for lru in (plain, held):
        lru.begin(0, asked[0])
        for request in asked[1:]:
            lru.begin(0, request)
            lru.end(0, request)
        lru.begin(0, again[0])
        lru.begin(0, again[2])
    assert held.hits_tokens == 2 * 16
    assert plain.hits_tokens[0] == 4 + 16  # of the first prompt one page was left


def test_chat_trace_as_published() -> None:
    """In the order of the trace; 1M to 64M tokens gave .053 .174 .261 .330 .365, ideal .366."""
    workload = load_workload(TRACES / "mooncake" / "conversation_trace.jsonl.gz")
    millions = (1, 4, 8, 16, 64)
    offline = OfflineLRU([n * 1_000_000 // 64 for n in millions], 64, 512)
    for session in workload.sessions:
        offline.begin(session.scope, session.requests[0])
        offline.end(session.scope, session.requests[0])
    rates = [hits / offline.queries_tokens for hits in offline.hits_tokens]
    assert rates == pytest.approx([0.053, 0.174, 0.261, 0.330, 0.365], abs=0.01)


def test_blocks_must_be_whole_pages() -> None:
    with pytest.raises(ValueError, match="don't divide"):
        OfflineLRU([1], 64, 96)
