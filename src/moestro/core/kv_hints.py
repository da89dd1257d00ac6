"""What clients may ask of cached KV, and what they are told: hints, requests, answers, reasons.

A hint never changes a token. It is bounded by quotas and every one is answered. Sessions belong
to a tenant: (cache_salt, session_id) names one, so another tenant's is unknown, not forbidden.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moestro.core.kv_events import KVEvent
from moestro.core.kv_stats import KVTierStats
from moestro.errors import RequestError, shown

DEFAULT_PRIORITY = 50
MAX_PRIORITY = 100
MAX_TTL_S = 86_400.0
MAX_SESSION_ID_CHARS = 256


class HintAction(enum.StrEnum):
    """pin: evict last until the TTL ends, which keeps it from other idle pages and not from
    running sequences; 0 ends it now. prefetch: bring to the device's
    reach (host tier) before it is needed. demote: let go of device and host first. drop: forget
    in every tier what no other session or request uses."""

    PIN = "pin"
    PREFETCH = "prefetch"
    DEMOTE = "demote"
    DROP = "drop"


class HintRefusal(enum.StrEnum):
    """Why nothing was accepted.

    in_use: running requests hold it, or others have used it. no_tier: it needs a tier that is
    off. busy: too much is queued; later may work.
    """

    UNKNOWN_SESSION = "unknown_session"
    NOT_CACHED = "not_cached"
    OVER_QUOTA = "over_quota"
    IN_USE = "in_use"
    NO_TIER = "no_tier"
    CACHING_OFF = "caching_off"
    BUSY = "busy"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVHints:
    """Hints of one request about its own KV. Raises RequestError with the field in `param`.

    session_id: names the request's tokens (prompt and output) for later hints; the newest
    request of a session is what the name means. pin_ttl_s: pin them so long from the end of the
    request; 0 ends the session's pin. priority 0 to 100: of two idle pages the lower one is
    evicted first. drop_on_finish: forget what only this request used once it ends.
    """

    session_id: str | None = None
    pin_ttl_s: float | None = None
    priority: int = DEFAULT_PRIORITY
    drop_on_finish: bool = False

    def __post_init__(self) -> None:
        if self.session_id is not None:
            check_session_id(self.session_id, "kv_hints.session_id")
        if self.pin_ttl_s is not None:
            check_ttl_s(self.pin_ttl_s, "kv_hints.pin_ttl_s")
        priority = self.priority
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(
                f"kv_hints.priority must be an integer, got {shown(priority)}.",
                "kv_hints.priority",
            )
        if not 0 <= priority <= MAX_PRIORITY:
            raise RequestError(
                f"kv_hints.priority must be in [0, {MAX_PRIORITY}], got {shown(priority)}.",
                "kv_hints.priority",
            )
        if not isinstance(self.drop_on_finish, bool):
            raise RequestError(
                f"kv_hints.drop_on_finish must be true or false, got {shown(self.drop_on_finish)}.",
                "kv_hints.drop_on_finish",
            )
        if self.drop_on_finish and self.pin_ttl_s:
            raise RequestError(
                "kv_hints.drop_on_finish and kv_hints.pin_ttl_s contradict each other: leave one "
                "out.",
                "kv_hints.drop_on_finish",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HintRequest:
    """One hint for KV that is there already, by a session's name or by its tokens: one of both.

    ttl_s: of pin, where it must be given, and of prefetch (how long to keep what was fetched).
    Raises RequestError with the field in `param`.
    """

    action: HintAction
    session_id: str | None = None
    token_ids: tuple[int, ...] | None = None
    cache_salt: str = ""
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.action, HintAction):
            raise RequestError(
                f"A hint is one of {', '.join(HintAction)}, not {shown(self.action)}.", "action"
            )
        check_cache_salt(self.cache_salt)
        if (self.session_id is None) == (self.token_ids is None):
            raise RequestError(
                f"{self.action} needs either a session_id or a prompt, and not both.", "session_id"
            )
        if self.session_id is not None:
            check_session_id(self.session_id, "session_id")
        if self.token_ids is not None and not self.token_ids:
            raise RequestError("The prompt is empty: give at least one token.", "prompt_token_ids")
        if self.ttl_s is not None:
            check_ttl_s(self.ttl_s, "ttl_s")
            if self.action in (HintAction.DEMOTE, HintAction.DROP):
                raise RequestError(f"{self.action} takes no ttl_s: leave it out.", "ttl_s")
        elif self.action is HintAction.PIN:
            raise RequestError(
                f"pin needs ttl_s: how long to keep it, in seconds, at most {MAX_TTL_S:g}.", "ttl_s"
            )


@dataclass(frozen=True, slots=True)
class HintAnswer:
    """What became of a hint. accepted + requested + clipped are the tokens that it named.

    accepted: tokens of whole pages that it holds for. requested: of a prefetch, tokens of whole
    pages that the store has been asked for; whether it has them is not known yet. clipped: the
    rest, because it is not cached, over quota, in use, or less than a page. refused: set when
    nothing is accepted or requested. expires_in_s: of a pin, from now; None without one.
    expires_at: the same as Unix time; the engine adds it, the cache knows no calendar.
    """

    accepted: int = 0
    clipped: int = 0
    refused: HintRefusal | None = None
    expires_in_s: float | None = None
    expires_at: float | None = field(default=None, compare=False)
    requested: int = 0


class MissReason(enum.StrEnum):
    """Why the cache did not have all of a prompt that it could have had.

    no_prefix: no cached prompt begins like it. differs: one does, up to the first differing token.
    evicted: it was cached and had to make room. other_namespace: cached for another cache_salt, or
    stored under another model, quantisation or page size. recomputed: loading it would have taken
    longer. load_failed: a tier did not give it (timeout, corrupt, unavailable). not_asked: prompt
    logprobs read nothing from the cache. caching_off.
    """

    NO_PREFIX = "no_prefix"
    DIFFERS = "differs"
    EVICTED = "evicted"
    OTHER_NAMESPACE = "other_namespace"
    RECOMPUTED = "recomputed"
    LOAD_FAILED = "load_failed"
    NOT_ASKED = "not_asked"
    CACHING_OFF = "caching_off"


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """What the cache gives, or would give, a prompt.

    Tokens by the tier that they came from. lookup_s: until it was known where the prompt's pages
    are; load_store_s: until they were in the host tier; load_host_s: into the device, within the
    first step (the engine fills it in; all loads of that step together). miss: why that is not
    all whole pages of the prompt; None when it is. first_difference: position of the first token
    that no cached prompt has there (the start of its page where only hashes are known); None
    unless miss is differs.
    """

    device_tokens: int = 0
    host_tokens: int = 0
    store_tokens: int = 0
    lookup_s: float = 0.0
    load_host_s: float = 0.0
    load_store_s: float = 0.0
    miss: MissReason | None = None
    first_difference: int | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Over all tiers."""
        return self.device_tokens + self.host_tokens + self.store_tokens


NOTHING_USED = PrefixUse()


class HintedCache(Protocol):
    """The part of a KV cache manager that hints and questions reach; called between two steps."""

    def hint(self, request: HintRequest) -> HintAnswer:
        """Do what can be done at once, start what takes time, and say what that is."""

    def explain(
        self, token_ids: Sequence[int], cache_salt: str, tell: Callable[[PrefixUse], None]
    ) -> None:
        """What a prompt would find now. Changes nothing, not even what is evicted next.

        tell: called once with the answer; at once, or between two later steps where the store
        has to be asked first.
        """

    def tier_stats(self) -> KVTierStats:
        """Gauges and counters of all tiers; asked once a step."""

    def take_events(self) -> list[KVEvent]:
        """What pages came and went since the last call; nothing unless events are recorded."""


def check_session_id(value: object, param: str) -> None:
    """Raises RequestError unless it can name a session."""
    if not isinstance(value, str):
        raise RequestError(f"{param} must be text, got {shown(value)}.", param)
    if not 0 < len(value) <= MAX_SESSION_ID_CHARS:
        raise RequestError(
            f"{param} must have 1 to {MAX_SESSION_ID_CHARS} characters, got {len(value)}.", param
        )
    if not value.isprintable():
        raise RequestError(f"{param} must be printable, got {shown(value)}.", param)


def check_cache_salt(value: object) -> None:
    """Raises RequestError unless it can name a tenant."""
    if not isinstance(value, str):
        raise RequestError(f"cache_salt must be text, got {shown(value)}.", "cache_salt")


def check_ttl_s(value: object, param: str) -> None:
    """Raises RequestError unless it is a number of seconds that a pin may last."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{param} must be a number of seconds, got {shown(value)}.", param)
    if not 0 <= value <= MAX_TTL_S:
        raise RequestError(
            f"{param} must be in [0, {MAX_TTL_S:g}] seconds, got {shown(value)}.", param
        )
