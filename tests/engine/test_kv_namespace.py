"""The namespace digest: the same for the same pages, another one for anything that changes them."""

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from moestro.config import EngineConfig
from moestro.core.hardware import HardwareSpec
from moestro.core.model_config import load_model_spec
from moestro.core.model_spec import ModelSpec, RopeSpec
from moestro.core.plan import Plan
from moestro.engine import kv_namespace
from moestro.engine.kv_namespace import namespace_digest
from moestro.planner.placement import make_plan
from moestro.weights.source import resolve_model

SPEC = load_model_spec(resolve_model("tiny-hy3"))
MACHINE = HardwareSpec("cpu", "test", 10**11, 10**11, 2, "avx2")
CHANGED_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "quantization": "w8a8",
    "kv_cache_dtype": "int8",
    "page_size": 32,
    "host_kv_dtype": "int8",
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
}
HARMLESS_OPTIONS: dict[str, Any] = {
    "host_kv_bytes": 10**8,
    "max_model_len": 500,
    "max_num_seqs": 3,
    "num_threads": 1,
    "kv_cache_memory_bytes": 10**8,
    "kv_store": "lmdb:///nowhere",
    "seed": 5,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
}


def plan(**options: Any) -> Plan:
    return make_plan("m", SPEC, MACHINE, EngineConfig(**options))


def digest(
    weights: str = "w", spec: ModelSpec = SPEC, device: str = "cpu", layers: int = 4, **options: Any
) -> bytes:
    return namespace_digest(weights, spec, plan(**options), device, layers)


def test_every_fact_changes_it() -> None:
    found = [
        digest(),
        digest(weights="v"),
        digest(device="cpu/avx512/3"),
        digest(layers=5),
        *(digest(host_kv_bytes=10**8, **{k: v}) for k, v in CHANGED_OPTIONS.items()),
        digest(quantization="w4a8", quantization_group_size=32),
        digest(quantization="w4a8", quantization_group_size=64),
        digest(kv_cache_dtype="int8", kv_hadamard=True),
    ]
    assert len(set(found)) == len(found)
    assert {len(d) for d in found} == {16}


@pytest.mark.parametrize("name", [f.name for f in fields(RopeSpec)])
def test_every_part_of_the_rotary_embedding_changes_it(name: str) -> None:
    before = getattr(SPEC.rope, name)
    after: Any = "yarn" if isinstance(before, str) else not before if before is True else before + 1
    assert digest(spec=replace(SPEC, rope=replace(SPEC.rope, **{name: after}))) != digest()


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-3},
        {"num_mtp_layers": 3},
        {"model_type": "other"},
        {"moe_layers": tuple(not m for m in SPEC.moe_layers)},
        {"num_key_value_heads": SPEC.num_key_value_heads * 2},
    ],
)
def test_the_rest_of_the_config_changes_it(change: dict[str, Any]) -> None:
    assert digest(spec=replace(SPEC, **change)) != digest()


@pytest.mark.parametrize("name", HARMLESS_OPTIONS)
def test_what_changes_no_byte_does_not(name: str) -> None:
    assert digest(**{name: HARMLESS_OPTIONS[name]}) == digest()


def test_the_layout_and_the_list_itself_have_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest()
    monkeypatch.setattr(kv_namespace, "LAYOUT_VERSION", 99)
    other = digest()
    monkeypatch.setattr(kv_namespace, "_VERSION", 99)
    assert len({before, other, digest()}) == 3


def test_another_process_finds_the_same() -> None:
    code = "from tests.engine.test_kv_namespace import digest; print(digest().hex())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-1] == digest().hex()
