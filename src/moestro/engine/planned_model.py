"""From a folder to a model whose weights are in place: packed, or mapped as they were packed."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from moestro import envs
from moestro.backends.base import Device
from moestro.config import EngineConfig
from moestro.core.model_spec import ModelSpec
from moestro.core.plan import Plan
from moestro.layers.moe import pack_routers
from moestro.layers.parameters import Parameters
from moestro.models.causal_lm import CausalLM
from moestro.models.registry import build_model
from moestro.weights.checkpoint import Checkpoint
from moestro.weights.fingerprint import fingerprint
from moestro.weights.loader import load_weights
from moestro.weights.packed_cache import FOLDER, PackedCache, cache_key
from moestro.weights.source import user_path

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
WORTH_CACHING_S = 2.0
"""auto keeps what took longer to load."""


def planned_model(
    device: Device,
    plan: Plan,
    spec: ModelSpec,
    model_dir: Path,
    config: EngineConfig,
    progress: Progress | None = None,
) -> CausalLM:
    """The model of the Plan. progress: (bytes read, bytes in all) while weights are read.

    Raises CheckpointError; RuntimeError or MemoryError when memory is refused.
    """
    dtype = getattr(torch, plan.dtype)
    parameters = Parameters(dtype, plan.weight_formats, device.name, device)
    model = build_model(spec, parameters, plan.num_mtp_layers)
    model.reserve_positions(plan.max_model_len)
    cache = _cache(config, plan, device)
    key = "" if cache is None else _key(device, plan, spec, model_dir)
    if cache is not None and cache.attach(key, model.weights):
        logger.info("weights: mapped as they were packed before")
    else:
        start = time.perf_counter()
        device.prepare_weights(
            p if isinstance(p, torch.Tensor) else p.codes for p in model.weights.values()
        )
        load_weights(spec, model.weights, model_dir, progress, backend=device)
        took = time.perf_counter() - start
        if cache is not None and (took > WORTH_CACHING_S or config.weight_cache != "auto"):
            cache.write(key, model.weights)
    pack_routers(model, device, dtype)
    return model


def cache_root(config: EngineConfig) -> Path:
    """The root of what is cached on disk."""
    return envs.CACHE_DIR.get() if config.cache_dir is None else user_path(config.cache_dir)


def _cache(config: EngineConfig, plan: Plan, device: Device) -> PackedCache | None:
    """None where nothing is kept: switched off, or floats in the rows layout, which a checkpoint
    holds already."""
    plain = plan.weight_formats.linear.is_float and not device.packs_weights
    if config.weight_cache == "off" or (plain and config.weight_cache == "auto"):
        return None
    if config.weight_cache == "auto":
        return PackedCache(cache_root(config) / FOLDER, config.weight_cache_bytes)
    return PackedCache(user_path(config.weight_cache), config.weight_cache_bytes)


def _key(device: Device, plan: Plan, spec: ModelSpec, model_dir: Path) -> str:
    """Everything that shapes the packed bytes."""
    with Checkpoint.open(model_dir) as checkpoint:
        files = (*checkpoint.files, model_dir / "config.json")
    return cache_key(
        {
            "files": fingerprint(files),
            "device": device.identity,
            "layout": device.packed_layout,
            "dtype": plan.dtype,
            "formats": repr(plan.weight_formats),
            "spec": repr(spec),
            "num_mtp_layers": plan.num_mtp_layers,
        }
    )
