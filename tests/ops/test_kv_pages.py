"""KVPages: parts that do not belong together are refused when they are put together."""

import pytest
import torch

from moestro import ops

FLOATS, CODES = torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 8, dtype=torch.int8)
SCALES = torch.ones(3, 2, 4)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_and_numbers_are_taken(dtype: torch.dtype) -> None:
    pages = ops.KVPages(FLOATS.to(dtype), FLOATS.to(dtype), SCALES, SCALES)
    assert (pages.page_size, pages.num_kv_heads, pages.head_dim) == (4, 2, 8)
    assert ops.KVPages(FLOATS, FLOATS).k_scales is None


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((CODES, CODES), r"torch\.int8 hold codes and need k_scales"),
        ((CODES, CODES, SCALES), r"torch\.int8 hold codes and need v_scales"),
        ((FLOATS, FLOATS, SCALES), r"torch\.float32 hold numbers and take no k_scales"),
        ((FLOATS, FLOATS, None, SCALES), r"torch\.float32 hold numbers and take no v_scales"),
        ((CODES, CODES, SCALES, SCALES[:2]), r"v_scales .* \[3, 2, 4\], not \[2, 2, 4\]"),
        ((CODES, CODES, SCALES.double(), SCALES), r"k_scales .* not \[3, 2, 4\] torch\.float64"),
        ((FLOATS, FLOATS[:2]), r"one shape and type, not \[3, 2, 4, 8\]"),
        ((FLOATS, CODES), "one shape and type"),
        ((SCALES, SCALES), r"pages \[P, G, B, D\]"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    parts: tuple[torch.Tensor, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ops.KVPages(*parts)
