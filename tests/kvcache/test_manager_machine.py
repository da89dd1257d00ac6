"""KVCacheManager under random use, against a model of what every page holds."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.kvcache.sequences import make_sequence

from moestro.core.request import Sequence
from moestro.kvcache import KVCacheManager

PLENTY = 2000
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class ManagerMachine(RuleBasedStateMachine):
    """`contents` says which token prefix (with its salt) each page's KV stands for.

    In a pool that is never full nothing is ever forgotten, so there hits must be exactly the
    longest published prefix; in a tiny pool they must at least never be wrong.
    """

    @initialize(
        num_pages=st.sampled_from([3, 5, 8, PLENTY]),
        page_size=st.integers(1, 4),
        caching=st.sampled_from([True, True, False]),
    )
    def start(self, num_pages: int, page_size: int, caching: bool) -> None:
        self.kv = KVCacheManager(num_pages, page_size, caching)
        self.size = page_size
        self.contents: dict[int, tuple] = {}
        self.published: set[tuple] = set()
        self.running: list[Sequence] = []
        self.resting: list[Sequence] = []

    def key(self, seq: Sequence, num_tokens: int) -> tuple:
        return (seq.request.cache_salt, *seq.token_ids[:num_tokens])

    @rule(token_ids=tokens, salt=st.sampled_from(["", "", "", "x"]), headroom=st.integers(0, 2))
    def admit_new(self, token_ids: list[int], salt: str, headroom: int) -> None:
        self.admit(make_sequence(token_ids, salt), headroom, use_cache=True)

    @rule(token_ids=tokens)
    def admit_without_cache(self, token_ids: list[int]) -> None:
        self.admit(make_sequence(token_ids), 0, use_cache=False)

    @precondition(lambda self: self.resting)
    @rule(data=st.data())
    def admit_again(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.resting))
        if self.admit(seq, 0, use_cache=True):
            self.resting.remove(seq)

    def admit(self, seq: Sequence, headroom: int, use_cache: bool) -> bool:
        available = self.kv.num_available_pages
        short = self.kv.pages_short(seq, headroom, use_cache)
        admitted = self.kv.admit(seq, headroom, use_cache)
        assert admitted == (short == 0)
        pages_needed = -(-len(seq.token_ids) // self.size)
        if not admitted:
            assert pages_needed + headroom > available
            assert self.kv.num_available_pages == available
            assert seq.pages == []
            return False
        assert self.kv.num_available_pages >= headroom
        assert len(seq.pages) == pages_needed
        self.check_hits(seq, use_cache)
        for page in seq.pages[seq.num_computed_tokens // self.size :]:
            self.contents[page] = ()
        self.running.append(seq)
        return True

    def check_hits(self, seq: Sequence, use_cache: bool) -> None:
        num_hits, rest = divmod(seq.num_computed_tokens, self.size)
        assert rest == 0
        assert seq.num_computed_tokens < len(seq.token_ids)
        for i in range(num_hits):
            assert self.contents[seq.pages[i]] == self.key(seq, (i + 1) * self.size)
        if not (use_cache and self.kv.enable_prefix_caching):
            assert num_hits == 0
        elif self.kv.num_pages == PLENTY:
            end = (num_hits + 1) * self.size
            assert end >= len(seq.token_ids) or self.key(seq, end) not in self.published

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def generate(self, data: st.DataObject, more: list[int]) -> None:
        seq = data.draw(st.sampled_from(self.running))
        before = len(seq.pages)
        new = self.kv.grow(seq, len(seq.token_ids) + len(more))
        if new is None:
            assert len(seq.pages) == before
            return
        seq.token_ids += more
        assert len(seq.pages) == before + len(new)
        for page in new:
            self.contents[page] = ()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """Compute some tokens; pages that get full are published and never written again."""
        seq = data.draw(st.sampled_from(self.running))
        done = seq.num_computed_tokens
        end = data.draw(st.integers(done, len(seq.token_ids)))
        for position in range(done, end):
            page = seq.pages[position // self.size]
            assert self.contents[page] not in self.published
            self.contents[page] = self.key(seq, position + 1)
        seq.num_computed_tokens = end
        self.kv.publish(seq, end)
        if self.kv.enable_prefix_caching:
            self.published |= {self.key(seq, (i + 1) * self.size) for i in range(end // self.size)}

    @precondition(lambda self: self.running)
    @rule(data=st.data(), rests=st.booleans())
    def release(self, data: st.DataObject, rests: bool) -> None:
        seq = data.draw(st.sampled_from(self.running))
        self.running.remove(seq)
        self.kv.release(seq)
        assert seq.pages == []
        if rests:
            seq.num_preemptions += 1
            self.resting.append(seq)

    @invariant()
    def every_page_has_an_owner(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check(self.running)
        stats = self.kv.stats()
        held = {page for seq in self.running for page in seq.pages}
        assert stats.num_used_pages == len(held)
        assert stats.hits_tokens <= stats.queries_tokens
        for seq in self.running:
            for i in range(seq.num_computed_tokens // self.size):
                assert self.contents[seq.pages[i]] == self.key(seq, (i + 1) * self.size)


TestManagerMachine = ManagerMachine.TestCase
