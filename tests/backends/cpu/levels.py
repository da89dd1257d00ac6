"""What the tests of the CPU bodies share: the levels of this machine, drawing, comparing."""

from collections.abc import Callable, Iterator

import pytest
import torch

from moestro.backends.cpu import library

LEVELS = library.native().levels() if library.has_native() else ()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
"""Largest error allowed, as a share of the largest value: fp32 sums, one rounding to the dtype."""


def at_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Body of a fixture: the level request.param with two threads, restored afterwards."""
    native = library.native()
    threads = native.num_threads()
    native.set_num_threads(2)
    with native.at_level(request.param):
        yield request.param
    native.set_num_threads(threads)


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers from torch's global generator."""
    return (torch.randn(*shape) * scale).to(dtype)


def assert_close(ours: torch.Tensor, exact: torch.Tensor, slack: float = 1.0) -> None:
    """Within the dtype's rounding of `exact` (float64), measured against its largest value."""
    assert ours.shape == exact.shape
    if not exact.numel():
        return
    error = (ours.double() - exact.double()).abs().max().item()
    limit = ROUNDING[ours.dtype] * slack * max(exact.double().abs().max().item(), 1e-30)
    assert error <= limit, f"error {error:.3g} above {limit:.3g}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality to the bit: NaN equals itself, -0 differs from 0."""
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def single_threaded(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The call's result with one thread."""
    native = library.native()
    native.set_num_threads(1)
    try:
        return call()
    finally:
        native.set_num_threads(2)
