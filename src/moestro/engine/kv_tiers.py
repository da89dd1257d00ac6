"""Wires the tiers below the device: host memory, and a store under the digest of what it holds."""

from moestro.config import EngineConfig
from moestro.core.plan import Plan
from moestro.kvcache.tier_policy import TierConfig, WritePolicy
from moestro.quant.kv import KV_DTYPES
from moestro.runner.host_pool import HostPool
from moestro.runner.kv_pool import KVPool
from moestro.runner.kv_tiers import KVTiers
from moestro.runner.page_loader import PageLoader
from moestro.runner.transfer import PageTransfer, TransferLimits

_ANSWER_S = 1.0
"""What an answer may take beside the store's own timeout before it is given up."""


def tier_config(config: EngineConfig, plan: Plan) -> TierConfig:
    """What the manager decides by."""
    return TierConfig(
        num_host_slots=plan.num_host_slots,
        keeps_host=plan.keeps_host,
        host_is_lossy=plan.host_is_lossy,
        write_policy=WritePolicy(config.kv_write_policy),
        selective_hits=config.kv_selective_hits,
        fetch_timeout_s=config.kv_store_timeout_s,
    )


def make_tiers(config: EngineConfig, plan: Plan, kv_pool: KVPool) -> KVTiers | None:
    """None where nothing is below the device."""
    if not plan.num_host_slots:
        return None
    host = HostPool(kv_pool, plan.num_host_slots, KV_DTYPES[plan.host_kv_dtype])
    transfer = PageTransfer(
        host,
        TransferLimits(
            background_bytes_per_s=config.kv_background_bytes_per_s,
            call_timeout_s=config.kv_store_timeout_s + _ANSWER_S,
        ),
    )
    loader = PageLoader(kv_pool.layers, host)
    return KVTiers(loader, transfer)
