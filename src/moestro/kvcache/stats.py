"""collect_stats: the gauges and counters of all tiers."""

from moestro.core.kv_stats import KVTierStats, Tier, TierStats
from moestro.kvcache.device_tier import DeviceTier
from moestro.kvcache.hints import HintDesk
from moestro.kvcache.lower_tiers import LowerTiers
from moestro.kvcache.tier_policy import TierConfig


def collect_stats(
    config: TierConfig, device: DeviceTier, below: LowerTiers, desk: HintDesk, page_size: int
) -> KVTierStats:
    """As of now; costs O(1)."""
    sinker, fetcher, sessions = below.sinker, below.fetcher, desk.sessions
    page_bytes, host_bytes = config.page_bytes or below.page_bytes, below.page_bytes
    tiers = [
        TierStats(
            Tier.DEVICE,
            bytes_used=(device.num_pages - device.allocator.num_free) * page_bytes,
            capacity_bytes=device.num_pages * page_bytes,
            pinned_bytes=sessions.num_pinned_pages * page_bytes,
            hits_tokens=below.hits_tokens["device"],
            num_evicted=device.num_evicted_pages,
        )
    ]
    mover = below.mover_state()
    if below.host.num_pages:
        tiers.append(
            TierStats(
                Tier.HOST,
                bytes_used=below.host.allocator.num_taken * host_bytes,
                capacity_bytes=below.host.num_pages * host_bytes,
                hits_tokens=below.hits_tokens["host"],
                num_promoted=below.num_loaded_pages,
                num_demoted=sinker.num_saved_pages,
                num_evicted=below.host.num_evicted_pages,
                load_bytes=below.load_bytes,
                load_s=below.load_s,
            )
        )
    if below.has_store and mover is not None:
        tiers.append(
            TierStats(
                Tier.STORE,
                bytes_used=mover.store_bytes,
                capacity_bytes=mover.store_capacity_bytes,
                hits_tokens=below.hits_tokens["store"],
                num_promoted=fetcher.num_fetched_pages,
                num_demoted=sinker.num_put_pages,
                num_evicted=mover.num_store_evicted,
                load_bytes=fetcher.num_fetched_bytes,
                load_s=fetcher.fetch_s,
            )
        )
    return KVTierStats(
        tiers=tuple(tiers),
        external_queries_tokens=fetcher.num_looked_up_pages * page_size,
        external_hits_tokens=below.hits_tokens["host"] + below.hits_tokens["store"],
        recomputed_tokens=fetcher.num_recomputed_pages * page_size,
        num_pins=sessions.num_pins,
        num_sessions=sessions.num_sessions,
        hints=sessions.hint_counts(),
        mover=mover,
    )
