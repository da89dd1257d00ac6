"""Conformance cases, how a body is run on one, and how its results are compared.

A case draws its arguments afresh from a seeded generator, so every body gets the same numbers.
"""

import zlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from moestro.ops.registry import Op

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One call of an op. make(generator) returns the keyword arguments, freshly drawn."""

    name: str
    dtype: torch.dtype
    make: Callable[[torch.Generator], Arguments]

    def draw(self) -> Arguments:
        """The arguments; the same ones every time."""
        seed = zlib.crc32(f"{self.name} {self.dtype}".encode())
        return self.make(torch.Generator().manual_seed(seed))


FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (2.0**-7, 2.0**-8),
    torch.float16: (2.0**-10, 2.0**-11),
}
"""(rtol, atol) a result's dtype: one rounding that falls the other way, and fp32 sums in another
order. atol is a share of the tensor's root mean square. Tight enough for a 1% error to show."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call returned and the arguments as it left them."""

    returned: Any
    arguments: Arguments


def call(fn: Callable[..., Any], arguments: Arguments) -> Outcome:
    """Run a body or a reference on copies of the arguments."""
    copied = deepcopy(arguments)
    return Outcome(fn(**copied), copied)


def normal(
    generator: torch.Generator, *shape: int, dtype: torch.dtype, scale: float = 1.0
) -> torch.Tensor:
    """Normal numbers of standard deviation `scale`."""
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def norm_weight(generator: torch.Generator, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Weights of a norm: around 1, none of them equal."""
    return (1.0 + 0.3 * torch.randn(size, generator=generator)).to(dtype)


def compare(actual: object, expected: object, dtype: torch.dtype, op: "Op") -> None:
    """Raise AssertionError unless two results agree.

    Tensors, tuples, lists, dicts and dataclasses of them, of equal structure. Integers, codes of
    one byte, flags, infinities and NaN must be equal; floating point numbers agree within the op's
    tolerance for `dtype` or the tensor's own dtype, whichever is wider.
    """
    pairs = zip(_leaves(actual), _leaves(expected), strict=True)
    for (path, ours), (_, theirs) in pairs:
        where = f"{op.name} result{path}"
        if not isinstance(theirs, torch.Tensor):
            assert ours == theirs, f"{where}: {ours!r} is not {theirs!r}"
            continue
        assert isinstance(ours, torch.Tensor), f"{where}: {ours!r} is no tensor"
        assert ours.dtype == theirs.dtype, f"{where}: dtype {ours.dtype}, not {theirs.dtype}"
        assert ours.shape == theirs.shape, f"{where}: shape {ours.shape}, not {theirs.shape}"
        if theirs.is_floating_point() and theirs.itemsize > 1:
            _compare_floats(ours, theirs, _tolerance(op, dtype, theirs.dtype), where)
        else:
            if theirs.itemsize == 1:
                ours, theirs = ours.view(torch.uint8), theirs.view(torch.uint8)
            assert torch.equal(ours, theirs), f"{where}: {_first_difference(ours, theirs)}"


def assert_same_bits(actual: object, expected: object, what: str) -> None:
    """Raise AssertionError unless both hold the same bits: NaN equals itself, -0 differs from 0."""
    pairs = zip(_leaves(actual), _leaves(expected), strict=True)
    for (path, ours), (_, theirs) in pairs:
        if not isinstance(theirs, torch.Tensor):
            assert ours == theirs, f"{what}{path}: {ours!r} is not {theirs!r}"
            continue
        assert isinstance(ours, torch.Tensor), f"{what}{path}: {ours!r} is no tensor"
        assert ours.dtype == theirs.dtype, f"{what}{path}: {ours.dtype} is not {theirs.dtype}"
        assert ours.shape == theirs.shape, f"{what}{path}: {ours.shape} is not {theirs.shape}"
        same = torch.equal(_bits(ours), _bits(theirs))
        assert same, f"{what}{path}: {_first_difference(_bits(ours), _bits(theirs))}"


def _tolerance(op: "Op", *dtypes: torch.dtype) -> tuple[float, float]:
    both = [op.tol.get(d, TOLERANCES.get(d, (0.0, 0.0))) for d in dtypes]
    return max(rtol for rtol, _ in both), max(atol for _, atol in both)


def _compare_floats(
    actual: torch.Tensor, expected: torch.Tensor, tol: tuple[float, float], where: str
) -> None:
    finite, infinite = expected.isfinite(), expected.isinf()
    assert torch.equal(actual.isnan(), expected.isnan()), f"{where}: NaN in other places"
    assert torch.equal(actual[infinite], expected[infinite]), f"{where}: infinities differ"
    ours, theirs = actual[finite].double(), expected[finite].double()
    if not theirs.numel():
        return
    size = theirs.square().mean().sqrt()
    error = (ours - theirs).abs()
    excess = error - (tol[0] * theirs.abs() + tol[1] * size)
    worst = int(excess.nan_to_num(nan=torch.inf).argmax())
    assert bool((excess <= 0).all()), (
        f"{where}: {ours[worst]:.8g} is not {theirs[worst]:.8g} (element {worst} of "
        f"{theirs.numel()}, rtol {tol[0]:.2g}, atol {tol[1]:.2g} of rms {size:.3g})"
    )
    # Single roundings average out; an error that all elements share does not.
    if theirs.numel() >= 64 and size > 0:
        share = error.square().mean().sqrt() / size
        assert share <= tol[0] / 2, f"{where}: off by {share:.3g} of its size on average"


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Tensors and plain values inside a structure, with where they are."""
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}[{i}]")
    else:
        yield path, value


def _bits(x: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(kinds[x.element_size()])


def _first_difference(actual: torch.Tensor, expected: torch.Tensor) -> str:
    at = tuple((actual != expected).nonzero()[0].tolist())
    return f"{actual[at]} is not {expected[at]} at {at}"
