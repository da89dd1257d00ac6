"""KVPool: shapes, bytes, and memory that comes and goes with use."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.runner.history_model import history_spec

from moestro.runner.kv_pool import KVPool


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def test_layers_have_the_documented_shape():
    spec = replace(history_spec(), num_key_value_heads=3, head_dim=8)
    pool = KVPool(spec, 5, 16, torch.bfloat16, num_layers=4)
    assert len(pool.layers) == 4
    for pages in pool.layers:
        for part in (pages.k, pages.v):
            assert part.shape == (5, 3, 16, 8)
            assert part.dtype == torch.bfloat16
            assert part.is_contiguous()
    assert pool.num_bytes == 4 * 2 * 5 * 3 * 16 * 8 * 2
    assert len(KVPool(spec, 5, 16, torch.bfloat16).layers) == 2


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_have_a_scale_a_row(dtype: torch.dtype):
    spec = replace(history_spec(), num_key_value_heads=3, head_dim=6)
    pool = KVPool(spec, 5, 1, dtype, num_layers=2, hadamard=True)
    assert pool.num_bytes == 2 * 2 * 5 * 3 * (6 + 4)
    for pages in pool.layers:
        assert pages.hadamard
        for codes, scales in ((pages.k, pages.k_scales), (pages.v, pages.v_scales)):
            assert codes.shape == (5, 3, 1, 6)
            assert codes.dtype == dtype
            assert scales.shape == (5, 3, 1)
            assert scales.dtype == torch.float32
            assert codes.is_contiguous()
            assert scales.is_contiguous()
    scales = pool.layers[0].k_scales
    pool.close()
    assert scales.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_layers_do_not_overlap(dtype: torch.dtype):
    pool = KVPool(history_spec(), 3, 4, dtype, num_layers=3)
    parts = [
        part
        for pages in pool.layers
        for part in (pages.k, pages.v, pages.k_scales, pages.v_scales)
        if part is not None
    ]
    for i, part in enumerate(parts):
        part.fill_(i)
    assert all(bool((part == i).all()) for i, part in enumerate(parts))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_resident_only_where_written_and_goes_on_close():
    spec = replace(history_spec(), num_key_value_heads=8, head_dim=128)
    before = resident_bytes()
    pool = KVPool(spec, 512, 64, torch.float32)
    assert pool.num_bytes == 512 << 20
    assert resident_bytes() - before < 16 << 20
    for pages in pool.layers:
        pages.k[100:130].fill_(1)
        pages.v[100:130].fill_(1)
    written = 30 * pool.num_bytes // 512
    assert 0.8 * written < resident_bytes() - before < written + (32 << 20)
    kept = pool.layers[0].k
    pool.close()
    assert resident_bytes() - before < 16 << 20
    assert kept.untyped_storage().nbytes() == 0
