"""Norms, activation and rotary embedding: against the reference in float64, and row by row."""

from collections.abc import Iterator

import pytest
import torch
from tests.backends.cpu.levels import (
    DTYPES,
    LEVELS,
    assert_close,
    at_level,
    draw,
    same_bits,
    single_threaded,
)

from moestro import ops
from moestro.ops.testing import assert_same_bits
from moestro.quant import kv as quantised

SIZES = (1, 7, 16, 33, 1000)


@pytest.fixture(params=LEVELS, autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from at_level(request)


def _norm64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_is_right(dtype: torch.dtype, size: int) -> None:
    x, weight = draw(3, 2, size, dtype=dtype), draw(size, dtype=dtype)
    assert_close(ops.rms_norm(x, weight, 1e-6), _norm64(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_reads_the_rounded_sum(dtype: torch.dtype) -> None:
    x, residual, weight = draw(5, 130, dtype=dtype), draw(5, 130, dtype=dtype), draw(130)
    normed, summed = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert same_bits(summed, x + residual)
    assert same_bits(normed, ops.rms_norm(summed, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_mtp_input_has_the_bits_of_its_parts(dtype: torch.dtype) -> None:
    embeddings, hidden_states = draw(6, 130, dtype=dtype), draw(6, 130, dtype=dtype)
    embeddings[3] = float("nan")  # not looked at: it is at position 0
    positions, weights = torch.tensor([0, 1, 2, 0, 1, 7]), (draw(130), draw(130))
    joined = ops.mtp_input(embeddings, hidden_states, positions, *weights, 1e-5)
    embedded = ops.rms_norm(embeddings, weights[0], 1e-5)
    embedded[[0, 3]] = 0
    assert same_bits(joined[:, :130], embedded)
    assert same_bits(joined[:, 130:], ops.rms_norm(hidden_states, weights[1], 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_silu_and_mul_is_right(dtype: torch.dtype, size: int) -> None:
    x = draw(4, 2 * size, dtype=dtype, scale=20.0)
    gate, up = x.double().chunk(2, dim=-1)
    assert_close(ops.silu_and_mul(x), gate * torch.sigmoid(gate) * up)


def test_silu_keeps_the_extremes() -> None:
    gate = torch.tensor([-1e30, -88.8, -0.0, 0.0, 88.8, 1e30, float("nan")])
    out = ops.silu_and_mul(torch.cat((gate, torch.ones(7)))[None])[0]
    assert out[6].isnan()
    assert out[:6].tolist() == pytest.approx([0, 0, 0, 0, 88.8, 1e30], rel=1e-6, abs=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 6), (16, 1, 128)])
def test_qk_norm_rope_is_right(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    qkv = draw(5, (heads + 2 * kv_heads) * dim, dtype=dtype)
    q_weight, k_weight, angles = draw(dim, dtype=dtype), draw(dim, dtype=dtype), draw(5, dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    ours = ops.qk_norm_rope(qkv, q_weight, k_weight, cos_sin, 1e-6, heads, kv_heads)
    q, k, v = qkv.view(5, -1, dim).split((heads, kv_heads, kv_heads), dim=1)
    cos, sin = cos_sin.double()[:, None].chunk(2, dim=-1)
    for out, x, weight in ((ours[0], q, q_weight), (ours[1], k, k_weight)):
        low, high = _norm64(x, weight, 1e-6).chunk(2, dim=-1)
        assert_close(out, torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1), 2)
    assert same_bits(ours[2], v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    x, weight = draw(37, 258, dtype=dtype), draw(258, dtype=dtype)
    x[20] = float("nan")  # a bad neighbour
    normed, active = ops.rms_norm(x, weight, 1e-6), ops.silu_and_mul(x)
    assert same_bits(normed, single_threaded(lambda: ops.rms_norm(x, weight, 1e-6)))
    for i in (0, 19, 36):
        assert same_bits(normed[i], ops.rms_norm(x[i], weight, 1e-6))
        assert same_bits(active[i : i + 1], ops.silu_and_mul(x[i : i + 1]))
    cos_sin = draw(37, 86)
    heads = ops.qk_norm_rope(x, weight[:86], weight[:86], cos_sin, 1e-6, 1, 1)
    alone = ops.qk_norm_rope(x[7:8], weight[:86], weight[:86], cos_sin[7:8], 1e-6, 1, 1)
    assert all(same_bits(a[7:8], b) for a, b in zip(heads, alone, strict=True))


def test_no_row_and_strided_rows() -> None:
    assert ops.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
    assert ops.silu_and_mul(torch.empty(0, 8)).shape == (0, 4)
    wide = draw(4, 64)
    narrow = wide[:, ::2]
    assert same_bits(
        ops.rms_norm(narrow, torch.ones(32), 1e-6),
        ops.rms_norm(narrow.contiguous(), torch.ones(32), 1e-6),
    )


PAGE_DTYPES = (*DTYPES, torch.int8, torch.float8_e4m3fn)


def _pages(dtype: torch.dtype, dim: int, *, hadamard: bool) -> ops.KVPages:
    codes = torch.zeros(2, 4, 3, 8, dim, dtype=torch.float32).to(dtype)
    scales = torch.full((2, 4, 3, 8), -1.0) if dtype.itemsize == 1 else (None, None)
    return ops.KVPages(*codes, *scales, hadamard)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_dtype", PAGE_DTYPES)
@pytest.mark.parametrize(
    ("heads", "dim", "rotary_dim", "hadamard"),
    [(6, 64, 64, True), (3, 128, 128, False), (3, 40, 18, False), (12, 16, 4, True)],
)
def test_the_fused_chain_has_the_bits_of_its_parts(
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    heads: int,
    dim: int,
    rotary_dim: int,
    hadamard: bool,
) -> None:
    tokens, kv_heads = 19, 3
    qkv = draw(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype, scale=4.0)
    weights = draw(dim, dtype=dtype), draw(dim, dtype=dtype)
    table, positions = draw(50, rotary_dim), torch.randint(50, (tokens,))
    slots = torch.randperm(32)[:tokens]
    slots[3] = -1
    fused, parts = (_pages(page_dtype, dim, hadamard=hadamard) for _ in "ab")
    rotary = ops.Rotary(table, positions)
    q = ops.qk_norm_rope_store(qkv, *weights, rotary, 1e-5, fused, slots)
    ours, k, v = ops.qk_norm_rope(qkv, *weights, table[positions], 1e-5, heads, kv_heads)
    if hadamard:
        ours, k = quantised.hadamard(ours), quantised.hadamard(k)
    ops.store_kv(k, v, parts, slots)
    assert same_bits(q, ours)
    assert_same_bits(fused, parts, "pages")


def test_the_fused_chain_refuses_positions_outside_the_table() -> None:
    pages = _pages(torch.float32, 16, hadamard=False)
    qkv, weight, table = draw(2, 8 * 16), draw(16), draw(50, 16)
    for bad in (-1, 50):
        rotary = ops.Rotary(table, torch.tensor([3, bad]))
        with pytest.raises(ValueError, match=rf"positions\[1\] is {bad}"):
            ops.qk_norm_rope_store(qkv, weight, weight, rotary, 1e-5, pages, torch.tensor([0, 1]))
    rotary = ops.Rotary(table, torch.tensor([3, 4]))
    with pytest.raises(ValueError, match=r"slot_mapping\[0\] is 32"):
        ops.qk_norm_rope_store(qkv, weight, weight, rotary, 1e-5, pages, torch.tensor([32, 1]))
