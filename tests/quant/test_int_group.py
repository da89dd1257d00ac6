"""The integer formats: rounding, packing, quantised activations, exact sums."""

import math

import pytest
import torch

from moestro import quant
from moestro.quant import int_group
from moestro.quant.format import WeightFormat

W8A8 = WeightFormat("w8a8")
FORMATS = [
    W8A8,
    *(WeightFormat("w4a8", size, zeros) for size in (32, 64, 128) for zeros in (False, True)),
]


def _weight(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 0.05


@pytest.mark.parametrize("weight_format", FORMATS)
def test_each_value_is_within_half_a_step(weight_format: WeightFormat) -> None:
    w = _weight(3, 17, 256)
    q = quant.quantize(w, weight_format)
    assert q.scales is not None
    size = weight_format.group_size or 256
    step = q.scales.abs().repeat_interleave(size, -1)
    # The codes are not symmetric (-8..7): the far end may lie a whole step away; and scales that
    # were rounded to bfloat16 move both ends by 1/256 of 8 steps.
    slack = 0.5 if weight_format.name == "w8a8" else 1.04
    assert ((quant.values(q) - w).abs() <= step * slack + 1e-9).all()
    assert q.num_bytes < w.nbytes / 3


@pytest.mark.parametrize("weight_format", FORMATS)
def test_quantising_values_again_changes_nothing(weight_format: WeightFormat) -> None:
    q = quant.quantize(_weight(9, 256), weight_format)
    again = quant.quantize(quant.values(q), weight_format)
    assert torch.allclose(quant.values(again), quant.values(q), rtol=1e-2, atol=1e-4)
    if weight_format.name == "w8a8":
        assert torch.equal(again.codes, q.codes)


def test_nibbles_are_low_first() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = int_group.pack_nibbles(codes)
    assert packed.tolist()[:2] == [0x10, 0x32]
    assert torch.equal(int_group.unpack_nibbles(packed), codes)


def test_the_extreme_of_a_group_becomes_minus_eight() -> None:
    w = torch.zeros(2, 32)
    w[0, 3], w[1, 5] = 2.0, -2.0
    q = quant.quantize(w, WeightFormat("w4a8", 32))
    assert q.scales is not None
    assert q.scales[:, 0].tolist() == [-0.25, 0.25]
    assert int_group.signed_codes(q)[0, 3] == int_group.signed_codes(q)[1, 5] == -8
    assert torch.equal(quant.values(q), w)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_zero_and_tiny_rows_have_scale_zero(weight_format: WeightFormat) -> None:
    w = torch.zeros(2, 128)
    w[1] = 1e-42
    q = quant.quantize(w, weight_format)
    assert q.scales is not None
    assert not q.scales.any()
    assert not quant.values(q).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("weight_format", [W8A8, WeightFormat("w4a8", 32), WeightFormat("fp8")])
def test_weights_that_are_not_finite_are_refused(bad: float, weight_format: WeightFormat) -> None:
    w = torch.ones(2, 32)
    w[1, 7] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        quant.quantize(w, weight_format)


@pytest.mark.parametrize(("columns", "size"), [(96, 64), (48, 32), (32, 0), (33, 33)])
def test_a_group_size_that_does_not_divide_is_named(columns: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"{columns} columns.*groups of {size}"):
        quant.quantize(torch.ones(2, columns), WeightFormat("w4a8", size))


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_product_is_exact_up_to_quantised_operands(weight_format: WeightFormat) -> None:
    """Against float64 on the very numbers that the codes stand for."""
    x = torch.randn(5, 2304, generator=torch.Generator().manual_seed(1)).bfloat16()
    w = quant.quantize(_weight(19, 2304), weight_format)
    codes, scales = int_group.quantize_activations(x)
    wanted = (codes.double() * scales[:, None].double()) @ quant.values(w).double().T
    got = quant.linear(x, w)
    assert got.dtype == torch.float32
    bound = wanted.abs().amax() * 2.0**-21
    assert (got.double() - wanted).abs().max() <= bound


def test_activation_codes_span_the_row() -> None:
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(2))
    codes, scales = int_group.quantize_activations(x)
    assert codes.dtype == torch.int8
    assert (codes.abs().amax(-1) == 127).all()
    assert ((codes * scales[:, None] - x).abs() <= scales[:, None] * 0.5001).all()


def test_activations_that_are_zero_tiny_or_not_finite() -> None:
    x = torch.zeros(5, 64)
    x[1, 3], x[2, 4], x[3, 5], x[4, 6] = 1e-40, math.nan, math.inf, -math.inf
    codes, scales = int_group.quantize_activations(x)
    assert not codes.any()
    assert scales[:2].tolist() == [0.0, 0.0]
    assert scales[2:].isnan().all()
    y = quant.linear(x, quant.quantize(_weight(3, 64), W8A8))
    assert not y[:2].any()
    assert y[2:].isnan().all()
    assert int_group.quantize_activations(torch.zeros(0, 64))[0].shape == (0, 64)


@pytest.mark.parametrize("weight_format", [*FORMATS, WeightFormat("fp8", 128)])
def test_new_rows_has_the_shapes_of_quantised_rows(weight_format: WeightFormat) -> None:
    q = quant.quantize(_weight(2, 6, 256), weight_format, paired=True)
    empty = quant.new_rows(weight_format, (2, 6, 256), paired=True)
    for made, wanted in zip(
        (empty.codes, empty.scales, empty.zeros), (q.codes, q.scales, q.zeros), strict=True
    ):
        assert (made is None) == (wanted is None)
        if made is not None and wanted is not None:
            assert (made.shape, made.dtype) == (wanted.shape, wanted.dtype)
    assert torch.equal(quant.values(quant.expert(q, 1)), quant.values(q)[1])
