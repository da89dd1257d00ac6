"""Policies of the KV tiers as pure functions: what moves between them, and when."""

import enum
from dataclasses import dataclass

from moestro.errors import ConfigError


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
    store at most beside the time that computing those tokens would take. default_priority: of
    runs without a hint, 0 to 100. session_share: of each tier's pages, what one session's pins
    may take. records_events: whether take_events gives any.
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
    max_pin_ttl_s: float = 3600.0
    records_events: bool = False

    def __post_init__(self) -> None:
        _check_range("num_host_slots", self.num_host_slots, 0, 1 << 40)
        _check_range("selective_hits", self.selective_hits, 1, 1 << 20)
        _check_range("high_water", self.high_water, 0.01, 1.0)
        _check_range("low_water", self.low_water, 0.0, self.high_water)
        _check_range("move_chunk_bytes", self.move_chunk_bytes, 1, 1 << 40)
        _check_range("fetch_timeout_s", self.fetch_timeout_s, 0.0, 3600.0)
        _check_range("default_priority", self.default_priority, 0, 100)
        _check_range("session_share", self.session_share, 0.0, 1.0)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be between {low} and {high}, got {value}.")
