"""The namespace digest: everything beside the tokens that changes the bytes of a KV page."""

import hashlib
import json
from dataclasses import asdict

from moestro.core.model_spec import ModelSpec
from moestro.core.plan import Plan
from moestro.runner.page_layout import LAYOUT_VERSION

DIGEST_BYTES = 16
_VERSION = 1
"""Of the list below."""


def namespace_digest(
    weights: str, spec: ModelSpec, plan: Plan, device_identity: str, num_kv_layers: int
) -> bytes:
    """16 bytes. Two engines with the same digest may use each other's pages.

    weights: of WeightsDigest. device_identity: equal strings give equal bits. num_kv_layers: the
    layers of a page, those of MTP among them. The spec tells what config.json says, RoPE included;
    the Plan how the weights are quantised and the pages kept. Where a rank holds a part of the
    heads, its layout counts too: sums over ranks are in another order.
    """
    facts = {
        "version": _VERSION,
        "layout": LAYOUT_VERSION,
        "weights": weights,
        "spec": asdict(spec),
        "dtype": plan.dtype,
        "weight_formats": repr(plan.weight_formats),
        "kv_cache_dtype": plan.kv_cache_dtype,
        "host_kv_dtype": plan.host_kv_dtype,
        "kv_hadamard": plan.kv_hadamard,
        "page_size": plan.page_size,
        "num_kv_layers": num_kv_layers,
        "num_mtp_layers": plan.num_mtp_layers,
        "device": device_identity,
        "ranks": 1,
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
