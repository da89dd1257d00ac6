"""Gauges and counters of the KV tiers at one moment, as /metrics shows them."""

import enum
from dataclasses import dataclass, field

from moestro.core.page_moves import MoverState


class Tier(enum.StrEnum):
    """Where a KV page is."""

    DEVICE = "device"
    HOST = "host"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier; counters only grow.

    bytes_used, capacity_bytes: of cached and held pages. pinned_bytes: of pages a pin keeps.
    hits_tokens: prompt tokens of first admissions found here. num_promoted: pages that came up
    from here; num_demoted: pages that sank to here; num_evicted: pages that left it to make room.
    load_bytes, load_s: read from here to the tier above, and how long that took.
    """

    tier: Tier
    bytes_used: int = 0
    capacity_bytes: int = 0
    pinned_bytes: int = 0
    hits_tokens: int = 0
    num_promoted: int = 0
    num_demoted: int = 0
    num_evicted: int = 0
    load_bytes: int = 0
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HintCounts:
    """How one kind of hint (a HintAction) has been answered so far; tokens accepted,
    requested of the store, clipped."""

    action: str
    num_accepted: int = 0
    num_refused: int = 0
    accepted_tokens: int = 0
    clipped_tokens: int = 0
    requested_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KVTierStats:
    """All tiers that are on, fastest first; the device always is.

    external_queries_tokens, external_hits_tokens: prompt tokens looked for below the device, and
    found. recomputed_tokens: found, and computed all the same because that was faster.
    mover: None without a tier below the device.
    """

    tiers: tuple[TierStats, ...] = ()
    external_queries_tokens: int = 0
    external_hits_tokens: int = 0
    recomputed_tokens: int = 0
    num_pins: int = 0
    num_sessions: int = 0
    hints: tuple[HintCounts, ...] = ()
    mover: MoverState | None = field(default=None)
