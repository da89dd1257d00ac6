"""Sessions: what names of sessions mean, which pins run, and what they may take. Pure accounts."""

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass

from moestro.core.kv_hints import HintAction, HintAnswer
from moestro.core.kv_stats import HintCounts
from moestro.kvcache.claim import Claim

SessionKey = tuple[str, str]
"""(cache_salt, session_id): a session of another tenant is another session."""

_MAX_TOKEN_BYTES = 1 << 28
"""Packed tokens remembered for all sessions together; the least recently named are forgotten."""
_MAX_SESSIONS = 100_000


@dataclass(slots=True)
class Pin:
    """Runs that are evicted last until `expires_s`."""

    owner: SessionKey
    claim: Claim
    num_pages: int
    expires_s: float


class Sessions:
    """Knows tokens, pins and counters; changes no run."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[SessionKey, bytes] = OrderedDict()
        self._num_bytes = 0
        self._pins: dict[SessionKey, Pin] = {}
        self._counts: dict[str, Counter[str]] = {}
        self.num_pinned_pages = 0
        self._next_expiry_s = math.inf

    @property
    def num_sessions(self) -> int:
        return len(self._tokens)

    @property
    def num_pins(self) -> int:
        return len(self._pins)

    def name(self, key: SessionKey, packed: bytes) -> None:
        """The session means these tokens from now on."""
        self.forget(key)
        self._tokens[key] = packed
        self._num_bytes += len(packed)
        while self._num_bytes > _MAX_TOKEN_BYTES or len(self._tokens) > _MAX_SESSIONS:
            _, oldest = self._tokens.popitem(last=False)
            self._num_bytes -= len(oldest)

    def tokens(self, key: SessionKey) -> bytes | None:
        """The packed tokens of a session, or None if nobody has named it (lately)."""
        return self._tokens.get(key)

    def forget(self, key: SessionKey) -> None:
        """The name means nothing any more."""
        self._num_bytes -= len(self._tokens.pop(key, b""))

    def pages_left(self, key: SessionKey, capacity: int, share: float, total: float) -> int:
        """How many pages the session may pin of a tier of this capacity: at most its share, and
        all sessions together at most `total`; a pin it has is replaced."""
        pin = self._pins.get(key)
        others = self.num_pinned_pages - (pin.num_pages if pin else 0)
        return max(0, min(int(share * capacity), int(total * capacity) - others))

    def pin(self, pin: Pin) -> None:
        """Account for a pin of a session that has none."""
        self._pins[pin.owner] = pin
        self.num_pinned_pages += pin.num_pages
        self._next_expiry_s = min(self._next_expiry_s, pin.expires_s)

    def unpin(self, key: SessionKey) -> Pin | None:
        """Take the pin of a session out of the accounts."""
        pin = self._pins.pop(key, None)
        if pin is not None:
            self.num_pinned_pages -= pin.num_pages
        return pin

    def expired(self, now_s: float) -> list[SessionKey]:
        """Whose pins have run out; costs nothing before the first of them does."""
        if now_s < self._next_expiry_s:
            return []
        over = [key for key, pin in self._pins.items() if now_s >= pin.expires_s]
        left = (pin.expires_s for pin in self._pins.values() if now_s < pin.expires_s)
        self._next_expiry_s = min(left, default=math.inf)
        return over

    def count(self, action: HintAction, answer: HintAnswer) -> HintAnswer:
        """Count an answer and give it back."""
        counts = self._counts.setdefault(action.value, Counter())
        counts["refused" if answer.refused else "accepted"] += 1
        counts["accepted_tokens"] += answer.accepted
        counts["clipped_tokens"] += answer.clipped
        counts["requested_tokens"] += answer.requested
        return answer

    def hint_counts(self) -> tuple[HintCounts, ...]:
        return tuple(
            HintCounts(
                action,
                counts["accepted"],
                counts["refused"],
                counts["accepted_tokens"],
                counts["clipped_tokens"],
                counts["requested_tokens"],
            )
            for action, counts in self._counts.items()
        )
