"""Every op x every body available here x every case, against the reference.

The CPU bodies run at each instruction set level of this machine.
"""

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

import moestro.backends.cpu  # noqa: F401 -- registers the bodies
from moestro import ops
from moestro.backends.cpu import library
from moestro.ops.registry import Body, Op
from moestro.ops.testing import Case, assert_same_bits, call, compare

LEVELS = library.native().levels() if library.has_native() else ("reference",)
OPS = ops.all_ops()
DEFINED_BY_THEMSELVES = {
    "add_rms_norm",
    "embedding",
    "linear",
    "token_logprobs",
}
"""Ops whose docstring is a complete definition; the others name their source."""
BODIES = [(op, body) for op in OPS for body in op.bodies.get("cpu", ())]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    native = library.has_native()
    with library.native().at_level(request.param) if native else nullcontext():
        yield request.param


def _cases(op: Op) -> Iterator[tuple[Case, dict]]:
    for case in op.cases():
        yield case, case.draw()


@pytest.mark.parametrize(("op", "body"), BODIES, ids=[f"{o.name}-{b.name}" for o, b in BODIES])
def test_body_conforms(op: Op, body: Body, level: str) -> None:
    served = 0
    for case, arguments in _cases(op):
        if body.when is not None and not body.when(**arguments):
            continue
        served += 1
        expected, actual = call(op.reference, arguments), call(body.fn, arguments)
        try:
            compare(actual.returned, expected.returned, case.dtype, op)
            for name, before in arguments.items():
                if name in op.mutates:
                    compare(actual.arguments[name], expected.arguments[name], case.dtype, op)
                else:
                    assert_same_bits(actual.arguments[name], before, f"argument {name}")
        except AssertionError as error:
            raise AssertionError(f"{op.name}, {case.name}, {case.dtype}: {error}") from error
    assert served, f"{body.name} takes no case of {op.name}"


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_call_finds_a_body_for_every_case(op: Op) -> None:
    for _, arguments in _cases(op):
        first, *others = (arguments[name] for name in op.signature.parameters)
        op(first, *others)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_cases_are_reproducible_and_distinct(op: Op) -> None:
    keys = [(case.name, case.dtype) for case in op.cases()]
    assert keys, f"{op.name} has no case"
    assert len(set(keys)) == len(keys)
    case = next(iter(op.cases()))
    assert_same_bits(case.draw(), case.draw(), "second draw")


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_contract_is_written_down(op: Op) -> None:
    doc = op.__doc__ or ""
    assert len(doc.split()) > 10
    assert "source" in doc.lower() or op.name in DEFINED_BY_THEMSELVES
    assert all(name in doc for name in op.mutates)
    for parameter in op.signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty
    assert op.signature.return_annotation is not inspect.Signature.empty
    assert set(op.mutates) <= set(op.signature.parameters)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_error_of_one_percent_is_seen(op: Op) -> None:
    # Neither the tolerances nor the sizes drawn leave room for a slightly wrong body.
    for case, arguments in _cases(op):
        expected = call(op.reference, arguments)
        results = (expected.returned, *(expected.arguments[name] for name in op.mutates))
        wrong, elements = _scaled(results, 1.01)
        if elements >= 64:
            with pytest.raises(AssertionError, match=op.name):
                compare(wrong, results, case.dtype, op)


def _scaled(value: Any, factor: float) -> tuple[Any, int]:
    """The structure with its floats multiplied, and how many of them change by that."""
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize > 1:
        return value * factor, int((value.isfinite() & (value != 0)).sum())
    if is_dataclass(value):
        parts = {f.name: _scaled(getattr(value, f.name), factor) for f in fields(value)}
        scaled = replace(value, **{name: part for name, (part, _) in parts.items()})
        return scaled, sum(n for _, n in parts.values())
    if isinstance(value, tuple):
        items = [_scaled(item, factor) for item in value]
        return tuple(item for item, _ in items), sum(n for _, n in items)
    return value, 0
