"""Policies of the KV tiers as pure functions: what moves between them, and when."""

import enum
import math
from dataclasses import dataclass

from moestro.errors import ConfigError

PINNED_PRIORITY = 101
"""Above every priority that a client can ask for."""


class WritePolicy(enum.StrEnum):
    """When full pages sink below the device.

    write_through: as soon as they are computed. write_through_selective: once they have been hit
    selective_hits times. write_back: when the device is about to evict them.
    """

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


@dataclass(frozen=True, slots=True)
class TierConfig:
    """The tiers below the device; the defaults have none.

    num_host_slots: pages that the host arena holds. keeps_host: False makes them a staging area
    for the store, in which nothing stays for a later hit. host_is_lossy: its pages differ from
    the device's and never go on to the store. Water marks: shares of the slots; above the high one
    eviction goes down to the low one ahead of need. fetch_timeout_s: what a request waits for the
    store at most beside the time that computing those tokens would take. move_chunk_bytes: of one
    move, in whole pages; a page that is larger (21 MB for Hy3) moves alone. default_priority: of
    runs without a hint, 0 to 100. session_share, pin_share: of each tier's pages, what the pins of
    one session and of all sessions may take. records_events: whether take_events gives any.
    page_bytes: of a device page, for gauges.
    """

    num_host_slots: int = 0
    keeps_host: bool = True
    host_is_lossy: bool = False
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    selective_hits: int = 2
    low_water: float = 0.90
    high_water: float = 0.95
    move_chunk_bytes: int = 8 << 20
    fetch_timeout_s: float = 1.0
    default_priority: int = 50
    session_share: float = 0.25
    pin_share: float = 0.5
    max_pin_ttl_s: float = 86_400.0
    records_events: bool = False
    page_bytes: int = 0

    def __post_init__(self) -> None:
        _check_range("num_host_slots", self.num_host_slots, 0, 1 << 40)
        _check_range("selective_hits", self.selective_hits, 1, 1 << 20)
        _check_range("high_water", self.high_water, 0.01, 1.0)
        _check_range("low_water", self.low_water, 0.0, self.high_water)
        _check_range("move_chunk_bytes", self.move_chunk_bytes, 1, 1 << 40)
        _check_range("fetch_timeout_s", self.fetch_timeout_s, 0.0, 3600.0)
        _check_range("default_priority", self.default_priority, 0, 100)
        _check_range("session_share", self.session_share, 0.0, 1.0)
        _check_range("pin_share", self.pin_share, 0.0, 1.0)


class Speed:
    """A rate measured as it goes: units a second, recent work counting most.

    None until the first measurement. Work and time are averaged apart, so that many small pieces
    don't outweigh a large one. What is older than max_age_s is forgotten with the next piece:
    things may be different now.
    """

    _KEEP = 0.8

    def __init__(self, max_age_s: float = math.inf) -> None:
        self._max_age_s = max_age_s
        self._work = 0.0
        self._seconds = 0.0
        self.measured_s: float | None = None
        """When it was measured last, by the caller's clock."""

    def add(self, work: float, seconds: float, now_s: float) -> None:
        """So much was done in so many seconds; nothing done tells nothing."""
        if work <= 0 or seconds <= 0:
            return
        if self.is_stale(now_s):
            self._work = self._seconds = 0.0
        self._work = self._work * self._KEEP + work
        self._seconds = self._seconds * self._KEEP + seconds
        self.measured_s = now_s

    def is_stale(self, now_s: float) -> bool:
        """Whether there is no measurement, or one so old that a small probe should renew it."""
        return self.measured_s is None or now_s - self.measured_s > self._max_age_s

    @property
    def per_s(self) -> float | None:
        return self._work / self._seconds if self._seconds else None

    def seconds_for(self, work: float) -> float | None:
        """How long so much would take; None while nothing has been measured."""
        return work * self._seconds / self._work if self._work else None


def should_load(load_s: float | None, recompute_s: float | None) -> bool:
    """Whether reading pages beats computing them. What is not known yet is worth measuring."""
    return load_s is None or recompute_s is None or load_s <= recompute_s


def pages_to_probe(
    old_load_s: float | None, compute_s: float | None, num_pages: int, chunk_pages: int
) -> int:
    """How many of `num_pages` to read for an old measurement's sake: a move's worth, unless at
    the old speed that would take more than a twentieth of what computing all of them takes.

    old_load_s, compute_s: of all num_pages.
    """
    most = min(num_pages, chunk_pages)
    if not old_load_s or compute_s is None:
        return most
    return max(1, min(most, int(num_pages * compute_s / old_load_s / 20)))


def should_sink(policy: WritePolicy, num_hits: int, selective_hits: int) -> bool:
    """Whether a computed run that a sequence has published or found is to be saved now."""
    if policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
        return num_hits >= selective_hits
    return policy is WritePolicy.WRITE_THROUGH


def pages_to_clean(num_free: int, num_pages: int, low: float, high: float) -> int:
    """write_back: how many pages should be free, or idle and saved, before they are needed.

    0 while fewer than the share `high` are taken; then as many as take the tier down to `low`.
    """
    if num_pages - num_free <= high * num_pages:
        return 0
    return num_pages - int(low * num_pages)


def pages_per_move(page_bytes: int, chunk_bytes: int) -> int:
    """At least one page a move, however large pages are."""
    return max(1, chunk_bytes // max(1, page_bytes))


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be between {low} and {high}, got {value}.")
