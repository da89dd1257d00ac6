"""Wires the tiers below the device: host memory, and a store under the digest of what it holds."""

from collections.abc import Callable
from pathlib import Path

from moestro.backends.base import Device
from moestro.config import EngineConfig
from moestro.core.model_spec import ModelSpec
from moestro.core.page_store import PageStore
from moestro.core.plan import Plan
from moestro.engine.kv_namespace import namespace_digest
from moestro.engine.planned_model import cache_root
from moestro.errors import CheckpointError
from moestro.kvcache.tier_policy import TierConfig, WritePolicy
from moestro.kvstore.opening import check_start, open_store
from moestro.quant.kv import KV_DTYPES
from moestro.runner.host_pool import HostPool
from moestro.runner.kv_pool import KVPool
from moestro.runner.kv_tiers import KVTiers
from moestro.runner.page_loader import PageLoader
from moestro.runner.store_opening import StoreOpening
from moestro.runner.transfer import PageTransfer, TransferLimits
from moestro.weights.checkpoint import Checkpoint
from moestro.weights.digest import WeightsDigest

EAGER_BYTES = 1 << 28
"""Weights up to this size are read for their digest while the engine is built."""
EAGER_S = 5.0
"""What building an engine waits for its store, once the digest is known or quick to have."""
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
        pin_share=config.kv_pin_share,
        session_share=config.kv_pin_share * config.kv_session_pin_share,
        records_events=config.kv_events.publishes,
        page_bytes=plan.kv_cache_bytes // plan.num_pages,
    )


def weights_digest(config: EngineConfig, plan: Plan, model_dir: Path) -> WeightsDigest | None:
    """Of the files as they are before they are loaded; None where no store asks for it.

    Raises ConfigError when the store can't be meant.
    """
    if plan.kv_store == "none":
        return None
    check_start(config.kv_store, config.kv_store_bytes)
    with Checkpoint.open(model_dir) as checkpoint:
        files = checkpoint.files
    try:
        return WeightsDigest(files, cache_root(config))
    except OSError as error:
        raise CheckpointError(f"{model_dir}: can't be read: {error}") from error


def make_tiers(
    config: EngineConfig,
    plan: Plan,
    spec: ModelSpec,
    device: Device,
    kv_pool: KVPool,
    weights: WeightsDigest | None,
) -> KVTiers | None:
    """None where nothing is below the device. Raises ConfigError when the store can't be meant."""
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
    if weights is None:
        return KVTiers(loader, transfer)
    num_layers = len(kv_pool.layers)
    known = weights

    def digest(is_stopped: Callable[[], bool]) -> bytes | None:
        found = known.compute(is_stopped)
        if found is None:
            return None
        return namespace_digest(found, spec, plan, device.identity, num_layers)

    opening = StoreOpening(transfer, digest, lambda found: _open(config, found))
    tiers = KVTiers(loader, transfer, opening)
    is_quick = weights.num_bytes <= EAGER_BYTES or weights.known() is not None
    try:
        opening.start(EAGER_S if is_quick else 0.0)
    except BaseException:
        tiers.close()
        raise
    return tiers


def _open(config: EngineConfig, digest: bytes) -> PageStore:
    return open_store(
        config.kv_store,
        digest=digest,
        capacity_bytes=config.kv_store_bytes,
        sync=config.kv_store_sync,
        timeout_s=config.kv_store_timeout_s,
    )
