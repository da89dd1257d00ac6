"""FP8 E4M3 weights: every code, rounding, blocks, ragged ends."""

import math

import pytest
import torch

from moestro import quant
from moestro.quant import fp8
from moestro.quant.format import WeightFormat, WeightTensor


def _decoded(code: int) -> float:
    """E4M3 by its definition."""
    sign, exponent, fraction = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


def test_every_code_decodes_as_the_format_says() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    weight = WeightTensor(WeightFormat("fp8"), (1, 256), codes, torch.full((1, 1), 0.5))
    got = quant.values(weight)[0].tolist()
    for code, value in enumerate(got):
        wanted = _decoded(code) * 0.5
        assert math.isnan(value) if math.isnan(wanted) else value == wanted
    assert fp8.has_nan(codes)
    assert not fp8.has_nan(codes[:, :0x7F])


@pytest.mark.parametrize("group_size", [0, 32, 128])
@pytest.mark.parametrize("columns", [128, 200])
def test_rounding_is_within_the_formats_step(group_size: int, columns: int) -> None:
    w = torch.randn(7, columns, generator=torch.Generator().manual_seed(0)) * 0.1
    q = quant.quantize(w, WeightFormat("fp8", group_size))
    assert q.scales is not None
    assert q.scales.shape == (7, q.format.num_groups(columns))
    scales = q.scales.repeat_interleave(group_size or columns, -1)[:, :columns]
    step = torch.maximum(w.abs() * 2.0**-4, scales * 2.0**-10) * 1.0001
    assert ((quant.values(q) - w).abs() <= step).all()


@pytest.mark.parametrize("group_size", [0, 128])
def test_a_product_matches_float64(group_size: int) -> None:
    x = torch.randn(5, 1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    w = torch.randn(9, 1000, generator=torch.Generator().manual_seed(0)) * 0.1
    q = quant.quantize(w, WeightFormat("fp8", group_size))
    wanted = x.double() @ quant.values(q).double().T
    assert (quant.linear(x, q).double() - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_zero_rows_have_scale_zero() -> None:
    q = quant.quantize(torch.zeros(2, 64), WeightFormat("fp8"))
    assert q.scales is not None
    assert not q.scales.any()
    assert not quant.values(q).any()


def test_a_packed_weight_is_not_read_as_rows() -> None:
    packed = WeightTensor(
        WeightFormat("fp8"), (2, 2), torch.zeros(4, dtype=torch.uint8), packed=True
    )
    with pytest.raises(ValueError, match="unpack"):
        quant.values(packed)
