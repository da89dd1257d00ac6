"""Packing weights: every bit comes back, rows may come in parts, what does not fit is refused."""

from dataclasses import replace

import pytest
import torch
from tests.backends.cpu.levels import draw, same_bits

from moestro import ops
from moestro.backends.cpu.packing import new_packed, pack, pack_rows, packed_bytes, unpack
from moestro.errors import UnsupportedError
from moestro.ops.linear import QUANTIZED_FORMATS
from moestro.quant.format import WeightFormat, WeightTensor
from moestro.quant.weight import expert, quantize

FORMATS = (*map(WeightFormat, ("float32", "bfloat16", "float16")), *QUANTIZED_FORMATS)


def _weight(weight_format: WeightFormat, *shape: int, paired: bool = False) -> WeightTensor:
    return quantize(draw(*shape), weight_format, paired=paired)


def _assert_same(ours: WeightTensor, theirs: WeightTensor) -> None:
    assert (ours.format, ours.shape) == (theirs.format, theirs.shape)
    assert torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
    for a, b in ((ours.scales, theirs.scales), (ours.zeros, theirs.zeros)):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.equal(a, b)


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("shape", "paired"),
    [
        ((1, 128), False),
        *(((m, k), paired) for m, k in ((50, 256), (130, 128)) for paired in (False, True)),
        *(((3, 34, 128), paired) for paired in (False, True)),
    ],
    ids=str,
)
def test_every_bit_comes_back(
    weight_format: WeightFormat, shape: tuple[int, ...], paired: bool
) -> None:
    rows = _weight(weight_format, *shape, paired=paired)
    packed = pack(rows)
    assert packed.codes.nbytes == packed_bytes(weight_format, shape, paired=paired)
    _assert_same(unpack(packed), rows)


@pytest.mark.parametrize("width", [1, 2, 7, 77])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "w8a8", "fp8"])
def test_odd_widths_come_back(name: str, width: int) -> None:
    rows = _weight(WeightFormat(name), 20, width)
    _assert_same(unpack(pack(rows)), rows)


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize("paired", [False, True])
def test_rows_may_come_in_parts_and_in_any_order(weight_format: WeightFormat, paired: bool) -> None:
    whole = _weight(weight_format, 2, 74, 128, paired=paired)
    target = new_packed(weight_format, whole.shape, paired=paired)
    for index in (1, 0):
        matrix = expert(whole, index)
        for start, end in ((70, 74), (0, 1), (1, 37), (37, 70)):
            part = WeightTensor(
                weight_format,
                (end - start, 128),
                matrix.codes[start:end],
                None if matrix.scales is None else matrix.scales[start:end],
                None if matrix.zeros is None else matrix.zeros[start:end],
            )
            pack_rows(target, part, expert=index, start=start)
    _assert_same(unpack(target), whole)


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_a_packed_weight_multiplies_as_its_rows_do(weight_format: WeightFormat) -> None:
    x = draw(5, 256)
    for paired in (False, True):
        rows = _weight(weight_format, 66, 256, paired=paired)
        expected = ops.linear.reference(x, rows, torch.float32)
        ours = ops.linear(x, pack(rows), torch.float32)
        assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_rows_of_a_packed_table() -> None:
    table = draw(70, 33, dtype=torch.bfloat16)
    packed = pack(quantize(table, WeightFormat("bfloat16")))
    ids = torch.tensor([69, 0, 17, 17])
    assert same_bits(ops.embedding(ids, packed), table[ids])
    with pytest.raises(ValueError, match=r"input_ids\[1\] is 70"):
        ops.embedding(torch.tensor([0, 70]), packed)


def test_scales_that_bfloat16_cannot_hold_are_named() -> None:
    rows = _weight(WeightFormat("w4a8", 32), 4, 64)
    assert rows.scales is not None
    rows.scales[2, 1] = 0.1
    with pytest.raises(ValueError, match=r"scale 1 of row 2 is 0\.1"):
        pack(rows)
    exact = replace(rows, format=WeightFormat("w4a8", 32, fp32_scales=True))
    _assert_same(unpack(pack(exact)), exact)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="groups of 32 do not fit 48 columns"):
        packed_bytes(WeightFormat("w4a8", 32), (4, 48), paired=False)
    with pytest.raises(UnsupportedError, match="fp8 groups of 1024"):
        packed_bytes(WeightFormat("fp8", 1024), (4, 2048), paired=False)
    with pytest.raises(UnsupportedError, match="3 rows are no pairs"):
        packed_bytes(WeightFormat("bfloat16"), (3, 8), paired=True)
    target = new_packed(WeightFormat("bfloat16"), (4, 8))
    with pytest.raises(ValueError, match="rows 3 to 5; there are 4"):
        pack_rows(target, _weight(WeightFormat("bfloat16"), 2, 8), start=3)
    with pytest.raises(ValueError, match="no part of a weight"):
        pack_rows(target, _weight(WeightFormat("w8a8"), 2, 8))
