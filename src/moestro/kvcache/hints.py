"""HintDesk: does what clients ask of cached runs, as far as it can be done at once."""

from collections.abc import Callable
from itertools import count

from moestro.core.kv_hints import HintAction, HintAnswer, HintRefusal, HintRequest, KVHints
from moestro.kvcache.claim import Claim
from moestro.kvcache.device_tier import DeviceTier
from moestro.kvcache.identity import TOKEN_BYTES, pack_tokens
from moestro.kvcache.lower_tiers import LowerTiers
from moestro.kvcache.prefix_index import PrefixIndex
from moestro.kvcache.run import Run
from moestro.kvcache.sessions import Pin, SessionKey, Sessions
from moestro.kvcache.tier_policy import PINNED_PRIORITY, TierConfig

Path = list[tuple[Run, int]]


class HintDesk:
    """A pinned run has the highest priority: it is evicted when nothing else is left to evict, as
    a running sequence must not wait for a hint. A demoted one has the lowest.

    Hints by session mean the tokens of its newest request. Everything stays within a tenant.
    """

    def __init__(
        self,
        config: TierConfig,
        index: PrefixIndex,
        device: DeviceTier,
        below: LowerTiers,
        clock: Callable[[], float],
    ) -> None:
        self.sessions = Sessions()
        self._config = config
        self._index = index
        self._device = device
        self._below = below
        self._clock = clock
        self._prefetch_ids = count(-1, -1)
        self._prefetches: dict[int, tuple[SessionKey, float]] = {}  # pin when they have come

    def hint(self, request: HintRequest) -> HintAnswer:
        """See HintedCache."""
        key = (request.cache_salt, request.session_id or f"\0tokens {hash(request.token_ids)}")
        if request.token_ids is not None:
            packed: bytes | None = pack_tokens(request.token_ids)
        else:
            packed = self.sessions.tokens(key)
        if packed is None:
            answer = HintAnswer(refused=HintRefusal.UNKNOWN_SESSION)
        else:
            act = {
                HintAction.PIN: self._pin,
                HintAction.PREFETCH: self._prefetch,
                HintAction.DEMOTE: self._demote,
                HintAction.DROP: self._drop,
            }[request.action]
            answer = act(key, packed, request.ttl_s)
        return self.sessions.count(request.action, answer)

    def finish(self, salt: str, packed: bytes, owner: str, hints: KVHints) -> HintAnswer:
        """A request with hints has ended; `owner` made the runs that are its alone."""
        key = (salt, owner)
        if hints.session_id is not None:
            self.sessions.name(key, packed)
        for run, _ in reversed(self._match(salt, packed)):
            if hints.priority > run.priority or run.owner == owner:
                self._set_priority(run, hints.priority)
        if hints.drop_on_finish:
            return self.sessions.count(HintAction.DROP, self._drop(key, packed, None))
        if hints.pin_ttl_s is not None:
            return self.sessions.count(HintAction.PIN, self._pin(key, packed, hints.pin_ttl_s))
        return self._answer(packed, sum(n for _, n in self._match(salt, packed)))

    def poll(self) -> bool:
        """Let go of pins whose time is over; whether there were any."""
        expired = self.sessions.expired(self._clock())
        for key in expired:
            self._unpin(key)
        return bool(expired)

    def prefetched(self, prefetch_id: int) -> None:
        """A prefetch has come to its end: keep it pinned as asked for."""
        wait = self._below.end_wait(prefetch_id)
        key, ttl_s = self._prefetches.pop(prefetch_id)
        if wait is not None and ttl_s > 0:
            self._pin(key, wait.packed, ttl_s)

    def _pin(self, key: SessionKey, packed: bytes, ttl_s: float | None) -> HintAnswer:
        assert ttl_s is not None
        ended = self._unpin(key)
        if ttl_s == 0:
            refused = None if ended else HintRefusal.NOT_CACHED
            return self._answer(packed, ended, refused, expires_in_s=0.0 if ended else None)
        path = self._match(key[0], packed)
        if not path:
            return self._answer(packed, 0, HintRefusal.NOT_CACHED)
        config, host = self._config, self._below.host
        capacity = max(self._device.num_pages, host.num_pages if config.keeps_host else 0)
        left = self.sessions.pages_left(key, capacity, config.session_share, config.pin_share)
        if not left:
            return self._answer(packed, 0, HintRefusal.OVER_QUOTA)
        ttl_s = min(ttl_s, config.max_pin_ttl_s)
        claim, num_pages = Claim(self._index, on_device=False, on_host=False), 0
        for found, num_equal in path:
            wanted = min(num_equal, left - num_pages)
            if not wanted:
                break
            run = found if wanted == found.num_pages else self._index.split(found, wanted)
            claim.add(run)
            num_pages += wanted
        for run in reversed(claim.runs):
            self._index.set_priority(run, PINNED_PRIORITY)
        self.sessions.pin(Pin(key, claim, num_pages, self._clock() + ttl_s))
        return self._answer(packed, num_pages, expires_in_s=ttl_s)

    def _unpin(self, key: SessionKey) -> int:
        """End the pin of a session; how many pages it held."""
        pin = self.sessions.unpin(key)
        if pin is None:
            return 0
        for run in reversed(pin.claim.end()):
            self._set_priority(run, self._index.default_priority)
            self._index.prune(run)
            self._index.join(run)
        return pin.num_pages

    def _prefetch(self, key: SessionKey, packed: bytes, ttl_s: float | None) -> HintAnswer:
        num_there = sum(num_equal for _, num_equal in self._match(key[0], packed))
        limit = self._num_pages(packed)
        keeps = self._config.keeps_host and self._below.host.num_pages > 0
        if num_there < limit and self._below.has_store and keeps:
            prefetch_id = next(self._prefetch_ids)
            if not self._below.fetcher.begin(prefetch_id, key[0], packed, limit):
                self._below.end_wait(prefetch_id)
                return self._answer(packed, num_there, None if num_there else HintRefusal.BUSY)
            self._prefetches[prefetch_id] = (key, ttl_s or 0.0)
            return self._answer(packed, num_there, num_requested=limit - num_there)
        if not num_there:
            refused = HintRefusal.NOT_CACHED if keeps else HintRefusal.NO_TIER
            return self._answer(packed, 0, refused)
        if ttl_s:
            return self._pin(key, packed, ttl_s)
        return self._answer(packed, num_there)

    def _demote(self, key: SessionKey, packed: bytes, _: float | None) -> HintAnswer:
        self._unpin(key)
        branch, is_there = self._branch(key, packed)
        for run in reversed(branch):
            self._index.set_priority(run, 0, oldest=True)
        return self._branch_answer(packed, branch, is_there)

    def _drop(self, key: SessionKey, packed: bytes, _: float | None) -> HintAnswer:
        self._unpin(key)
        branch, is_there = self._branch(key, packed)
        dropped = []
        for run in branch:
            if self._device.order.is_pinned(run) or self._below.host.order.is_pinned(run):
                self._index.set_priority(run, 0, oldest=True)  # a move reads it: it goes next
                continue
            dropped.append(run)
        self._below.forget(dropped)
        for run in dropped:
            if run.pages:
                self._device.drop(run)
            if run.slots:
                self._below.host.drop(run)
        answer = self._branch_answer(packed, dropped, is_there)
        self.sessions.forget(key)
        return answer

    def _branch(self, key: SessionKey, packed: bytes) -> tuple[list[Run], bool]:
        """Idle runs of a session or prompt that nobody else uses, last one first; whether there
        is anything of it at all."""
        path = self._match(key[0], packed)
        by_tokens = key[1].startswith("\0tokens")
        branch: list[Run] = []
        for run, _ in reversed(path):
            is_leaf = not run.children or list(run.children.values()) == branch[-1:]
            is_its_own = by_tokens or run.owner == key[1]
            if not (is_leaf and is_its_own) or run.num_users or _is_pin(run):
                break
            branch.append(run)
        return branch, bool(path)

    def _branch_answer(self, packed: bytes, branch: list[Run], is_there: bool) -> HintAnswer:
        num_pages = min(sum(run.num_pages for run in branch), self._num_pages(packed))
        refused = HintRefusal.IN_USE if is_there else HintRefusal.NOT_CACHED
        return self._answer(packed, num_pages, None if num_pages else refused)

    def _set_priority(self, run: Run, priority: int) -> None:
        self._index.set_priority(run, PINNED_PRIORITY if _is_pin(run) else priority)

    def _match(self, salt: str, packed: bytes) -> Path:
        """The resident runs that these tokens begin with."""
        path = []
        for run, num_equal in self._index.match(salt, packed, self._num_pages(packed)):
            if not (run.pages or run.slots):
                break
            path.append((run, num_equal))
        return path

    def _num_pages(self, packed: bytes) -> int:
        return len(packed) // (TOKEN_BYTES * self._index.page_size)

    def _answer(
        self,
        packed: bytes,
        num_pages: int,
        refused: HintRefusal | None = None,
        expires_in_s: float | None = None,
        num_requested: int = 0,
    ) -> HintAnswer:
        size = self._index.page_size
        accepted, requested = num_pages * size, num_requested * size
        clipped = max(0, len(packed) // TOKEN_BYTES - accepted - requested)
        if not (accepted or requested) and refused is None:
            refused = HintRefusal.NOT_CACHED
        return HintAnswer(accepted, clipped, refused, expires_in_s, requested=requested)


def _is_pin(run: Run) -> bool:
    return any(claim.is_pin for claim in run.claims)
