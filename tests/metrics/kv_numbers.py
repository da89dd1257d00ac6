"""Numbers of an engine with every tier on, each one different."""

from moestro.core.kv_stats import HintCounts, KVTierStats, Tier, TierStats
from moestro.core.page_moves import MoverState

FULL = KVTierStats(
    tiers=(
        TierStats(Tier.DEVICE, 1000, 2000, 300, 64, num_evicted=7),
        TierStats(Tier.HOST, 3000, 4000, 500, 128, 1, 2, 3, 4096, 0.5),
        TierStats(Tier.STORE, 5000, 6000, 0, 256, 4, 5, 6, 8192, 2.5),
    ),
    external_queries_tokens=900,
    external_hits_tokens=384,
    recomputed_tokens=77,
    num_pins=2,
    num_sessions=9,
    hints=(HintCounts("pin", 3, 1, 640, 20), HintCounts("drop", 5, 0, 100, 0)),
    mover=MoverState(12345, 5000, 6000, "half_open", 8, (("timeout", 4), ("corrupt", 2))),
)
