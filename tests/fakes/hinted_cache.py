"""A cache that takes every hint and remembers what it was asked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moestro.core.kv_events import KVEvent
from moestro.core.kv_hints import HintAnswer, HintRefusal, HintRequest, MissReason, PrefixUse
from moestro.core.kv_stats import KVTierStats
from moestro.errors import CapacityError

PAGE_SIZE = 4


@dataclass
class HintedCacheFake:
    """Whole pages of 4 tokens are accepted; session "known" has 10 tokens, others are unknown.

    A prompt that begins with token 13 raises. To the salt "nosy" all prompts are another
    tenant's. events: what the next take_events gives.
    """

    hints: list[HintRequest] = field(default_factory=list)
    asked: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    events: list[KVEvent] = field(default_factory=list)
    stats: KVTierStats = field(default_factory=KVTierStats)

    def hint(self, request: HintRequest) -> HintAnswer:
        self.hints.append(request)
        num_tokens = 10 if request.token_ids is None else len(request.token_ids)
        if request.session_id not in (None, "known"):
            return HintAnswer(refused=HintRefusal.UNKNOWN_SESSION)
        if request.token_ids and request.token_ids[0] == 13:
            raise CapacityError("13 does not fit.")
        accepted = num_tokens // PAGE_SIZE * PAGE_SIZE
        return HintAnswer(accepted, num_tokens - accepted, expires_in_s=request.ttl_s)

    def explain(
        self, token_ids: Sequence[int], cache_salt: str, tell: Callable[[PrefixUse], None]
    ) -> None:
        self.asked.append((tuple(token_ids), cache_salt))
        if cache_salt == "nosy":
            tell(PrefixUse(miss=MissReason.OTHER_NAMESPACE))
            return
        tell(
            PrefixUse(device_tokens=4, store_tokens=8, miss=MissReason.DIFFERS, first_difference=12)
        )

    def tier_stats(self) -> KVTierStats:
        return self.stats

    def take_events(self) -> list[KVEvent]:
        taken, self.events = self.events, []
        return taken
