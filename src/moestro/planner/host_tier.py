"""HostTier: how much of the host's memory holds KV pages, and as what."""

from dataclasses import dataclass

from moestro.config import EngineConfig
from moestro.core.model_spec import ModelSpec
from moestro.errors import ConfigError, without_password
from moestro.planner.sizes import kv_token_bytes
from moestro.planner.units import gigabytes

STAGING_BYTES = 256 * 2**20
"""What a store without a host tier has its pages pass through, where an eighth of the memory that
is left allows."""
_MIN_STAGING_PAGES = 4


@dataclass(frozen=True, slots=True)
class HostTier:
    """num_slots pages of page_bytes each; keeps: whether they stay for later hits."""

    dtype: str
    page_bytes: int
    num_slots: int
    keeps: bool = True

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.page_bytes


def plan_host_tier(
    spec: ModelSpec,
    config: EngineConfig,
    kv_cache_dtype: str,
    num_mtp_layers: int,
    left_bytes: int,
) -> tuple[HostTier, list[str]]:
    """The tier and what to say of it. num_mtp_layers: with KV in every page; left_bytes: beside
    weights and buffers.

    Raises ConfigError for options that contradict each other.
    """
    dtype = _choose_dtype(spec, config, kv_cache_dtype)
    page_bytes = kv_token_bytes(spec, dtype, num_mtp_layers) * config.page_size
    has_store = config.kv_store != "none"
    if not config.host_kv_bytes and not has_store:
        return HostTier(dtype, page_bytes, 0), []
    if not config.enable_prefix_caching:
        what = "kv_store" if has_store else "host_kv_bytes"
        raise ConfigError(
            f"{what} keeps pages for later prompts, but enable_prefix_caching is false: no page "
            "would ever be looked for. Leave one of the two out."
        )
    if not config.host_kv_bytes:
        slots = min(STAGING_BYTES, left_bytes // 8) // page_bytes
        tier = HostTier(dtype, page_bytes, max(_MIN_STAGING_PAGES, slots), keeps=False)
        return tier, [
            f"pages pass to and from the store through {gigabytes(tier.num_bytes)} of host memory, "
            f"{tier.num_slots * config.page_size:,} tokens at a time (host_kv_bytes keeps them)"
        ]
    if config.host_kv_bytes < page_bytes:
        raise ConfigError(
            f"host_kv_bytes={config.host_kv_bytes} holds not even one page of {config.page_size} "
            f"tokens, which takes {page_bytes} bytes. Give at least that, or 0 for no host tier."
        )
    tier = HostTier(dtype, page_bytes, config.host_kv_bytes // page_bytes)
    if dtype == kv_cache_dtype:
        return tier, []
    return tier, [
        f"hit != miss: host KV is {dtype}, narrower than the device's {kv_cache_dtype}; tokens "
        "after a host hit may differ from those of a computed prompt (host_kv_dtype chooses)"
    ]


def _choose_dtype(spec: ModelSpec, config: EngineConfig, kv_cache_dtype: str) -> str:
    wanted = config.host_kv_dtype
    if wanted in ("auto", kv_cache_dtype):
        return kv_cache_dtype
    if not config.host_kv_bytes:
        raise ConfigError(
            f"host_kv_dtype={wanted!r} needs a host tier: give host_kv_bytes, or leave it auto."
        )
    if kv_token_bytes(spec, wanted, 0) >= kv_token_bytes(spec, kv_cache_dtype, 0):
        raise ConfigError(
            f"host_kv_dtype={wanted!r} is not narrower than the device's {kv_cache_dtype}: it "
            "would lose bits and save no memory. Use auto."
        )
    if config.kv_store != "none":
        raise ConfigError(
            f"host_kv_dtype={wanted!r} is lossy, and lossy pages never go to a store, but kv_store "
            f"is {without_password(config.kv_store)!r}. Use host_kv_dtype='auto', or no store."
        )
    return wanted
