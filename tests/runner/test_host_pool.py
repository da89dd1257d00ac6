"""HostPool: the canonical layout byte for byte, moves there and back, narrower types."""

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.runner.history_model import history_spec

from moestro.quant.kv import dequantize_rows, quantize_rows
from moestro.runner.host_pool import HostPool
from moestro.runner.kv_pool import KVPool

SPEC = replace(history_spec(), num_key_value_heads=3, head_dim=6)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]


def filled_pool(dtype: torch.dtype, num_pages: int = 7, page_size: int = 5) -> KVPool:
    """Random bytes everywhere; any byte is a value as far as moves go."""
    pool = KVPool(SPEC, num_pages, page_size, dtype, num_layers=3)
    generator = torch.Generator().manual_seed(1)
    for pages in pool.layers:
        for part in parts(pages):
            part.copy_(torch.randint(0, 256, part.shape, generator=generator, dtype=torch.uint8))
    return pool


def parts(pages) -> list[torch.Tensor]:
    tensors = [pages.k, pages.k_scales, pages.v, pages.v_scales]
    return [t.view(torch.uint8) for t in tensors if t is not None]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_page_lies_in_the_canonical_layout(dtype: torch.dtype):
    pool = filled_pool(dtype)
    host = HostPool(pool, 4)
    host.save(range(3), [5], [2])
    expected = b"".join(
        bytes(part[5, head].flatten().tolist())
        for pages in pool.layers
        for head in range(3)
        for part in parts(pages)
    )
    assert bytes(host.payload(2)) == expected
    assert host.page_bytes == len(expected) == pool.num_bytes // pool.num_pages
    assert not host.is_lossy


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_come_back_as_they_went(dtype: torch.dtype):
    pool = filled_pool(dtype)
    before = [[part.clone() for part in parts(pages)] for pages in pool.layers]
    host = HostPool(pool, 8)
    pages, slots = [0, 1, 2, 6, 3], [4, 5, 6, 0, 2]  # one run of three, and single ones
    for layers in (range(1), range(1, 3)):
        host.save(layers, pages, slots)
    targets = [6, 5, 4, 3, 2]
    for layer in range(3):
        host.load(layer, slots, targets)
    for held, was in zip(pool.layers, before, strict=True):
        for part, old in zip(parts(held), was, strict=True):
            for page, target in zip(pages, targets, strict=True):
                assert torch.equal(part[target], old[page])
            assert torch.equal(part[:2], old[:2])  # pages that nothing was loaded into


def test_payloads_go_in_and_out_without_a_device():
    host = HostPool(filled_pool(torch.int8), 3)
    payload = bytes(i % 251 for i in range(host.page_bytes))
    host.fill(1, payload)
    assert bytes(host.payload(1)) == payload
    with pytest.raises(ValueError, match=r"broadcast|shape"):
        host.fill(1, payload[:-1])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16])
def test_a_narrower_type_rounds_as_its_spec_says(dtype: torch.dtype):
    pool = KVPool(SPEC, 4, 5, torch.float32, num_layers=2)
    generator = torch.Generator().manual_seed(2)
    for pages in pool.layers:
        pages.k.normal_(generator=generator)
        pages.v.normal_(generator=generator)
    host = HostPool(pool, 3, dtype)
    assert host.is_lossy
    assert host.page_bytes < pool.num_bytes // pool.num_pages
    wanted = []
    for layer, pages in enumerate(pool.layers):
        for rows in (pages.k[1].clone(), pages.v[1].clone()):
            if dtype == torch.bfloat16:
                wanted.append(rows.to(dtype).float())
            else:
                wanted.append(dequantize_rows(*quantize_rows(rows, dtype)))
        host.save(range(layer, layer + 1), [1], [2])
        host.load(layer, [2], [3])
    got = [rows for pages in pool.layers for rows in (pages.k[3], pages.v[3])]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    if dtype == torch.int8:
        codes, scales = quantize_rows(pool.layers[0].k[1, 0], dtype)
        head = codes.numpy().tobytes() + scales.numpy().tobytes()
        assert bytes(host.payload(2)[: len(head)]) == head
        assert struct.calcsize("f") * 5 == scales.nbytes


def test_what_a_view_shows_outlives_the_pool():
    host = HostPool(filled_pool(torch.bfloat16), 2)
    host.fill(0, b"\x07" * host.page_bytes)
    view = host.payload(0)
    host.close()
    host.close()
    assert set(view) == {7}
    assert host.num_bytes == 0
    with pytest.raises(IndexError):
        host.save(range(1), [0], [0])
    assert np.frombuffer(view, np.uint8).size == len(view)
