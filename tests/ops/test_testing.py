"""The comparison itself: what it accepts and what it must refuse."""

import pytest
import torch

from moestro import ops
from moestro.ops.testing import assert_same_bits, call, compare

OP = ops.rms_norm
BF16, FP32 = torch.bfloat16, torch.float32


def _refuses(actual: object, expected: object, match: str, dtype: torch.dtype = FP32) -> None:
    with pytest.raises(AssertionError, match=match):
        compare(actual, expected, dtype, OP)


def test_rounding_passes_and_larger_errors_do_not() -> None:
    x = torch.randn(200, generator=torch.Generator().manual_seed(0))
    compare(x * (1 + 1e-6), x, FP32, OP)
    _refuses(x * 1.0001, x, "rms_norm result: ")
    _refuses(x + 1e-3 * (torch.arange(200) == 7), x, "element 7 of 200")
    compare((x * (1 + 2.0**-9)).to(BF16), x.to(BF16), BF16, OP)
    _refuses((x * 1.01).to(BF16), x.to(BF16), "rms_norm", BF16)


def test_shared_error_below_one_rounding_is_refused() -> None:
    x = torch.ones(100)
    compare(x[:10] * (1 + 8e-6), x[:10], FP32, OP)
    _refuses(x * (1 + 8e-6), x, "on average")


def test_shape_dtype_and_kind_are_compared() -> None:
    _refuses(torch.ones(2), torch.ones(2, 1), "shape")
    _refuses(torch.ones(2).double(), torch.ones(2), "dtype")
    _refuses((torch.ones(2), 3), (torch.ones(2), 4), "3 is not 4")
    _refuses(torch.tensor([1, 2]), torch.tensor([1, 3]), r"2 is not 3 at \(1,\)")
    ones = torch.ones(1, 1, 1, 2)
    _refuses(ops.KVPages(ones, ones * 0), ops.KVPages(ones, ones), r"result\.v")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_special_values_must_be_in_the_same_places(value: float) -> None:
    special = torch.tensor([1.0, value])
    compare(special, special.clone(), FP32, OP)
    _refuses(torch.ones(2), special, "rms_norm")
    _refuses(special, torch.ones(2), "rms_norm")
    _refuses(-special, special, "rms_norm")


def test_same_bits_tells_zeros_apart_and_accepts_nan() -> None:
    assert_same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]), "x")
    with pytest.raises(AssertionError, match="x"):
        assert_same_bits(torch.tensor([0.0]), torch.tensor([-0.0]), "x")


def test_call_leaves_the_arguments_alone() -> None:
    x = torch.zeros(2)
    outcome = call(lambda x: x.add_(1), {"x": x})
    assert x.tolist() == [0, 0]
    assert outcome.arguments["x"].tolist() == [1, 1]
