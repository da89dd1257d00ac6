"""The levels of this machine against each other: near within the op's tolerance, integers equal."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.backends.cpu.levels import LEVELS

import moestro.backends.cpu  # noqa: F401 -- registers the bodies
from moestro import ops
from moestro.backends.cpu import library
from moestro.ops.registry import Body, Op
from moestro.ops.testing import Outcome, assert_same_bits, call, compare
from moestro.quant.format import WeightTensor

pytestmark = pytest.mark.skipif(len(LEVELS) < 2, reason="one level alone")

BODIES = [(op, body) for op in ops.all_ops() for body in op.bodies.get("cpu", ())]
EXACT_FORMATS = ("w8a8", "w4a8")
"""Formats whose products are integers up to two multiplications: every level gives their bits."""


@pytest.mark.parametrize(("op", "body"), BODIES, ids=[f"{o.name}-{b.name}" for o, b in BODIES])
def test_levels_agree(op: Op, body: Body) -> None:
    native = library.native()
    for case in op.cases():
        arguments = case.draw()
        if body.when is not None and not body.when(**arguments):
            continue
        outcomes: dict[str, Outcome] = {}
        for level in LEVELS:
            with native.at_level(level):
                outcomes[level] = call(body.fn, arguments)
        first = outcomes.pop(LEVELS[0])
        for level, other in outcomes.items():
            where = f"{op.name}, {case.name}, {case.dtype}, {level} and {LEVELS[0]}"
            try:
                compare(other.returned, first.returned, case.dtype, op)
                for name in op.mutates:
                    compare(other.arguments[name], first.arguments[name], case.dtype, op)
            except AssertionError as error:
                raise AssertionError(f"{where}: {error}") from error
            if op.name == "linear" and _is_exact(arguments):
                assert_same_bits(other.returned, first.returned, where)


def _is_exact(arguments: dict[str, Any]) -> bool:
    weights = list(_weights(arguments))
    return bool(weights) and all(w.format.name in EXACT_FORMATS for w in weights)


def _weights(arguments: dict[str, Any]) -> Iterator[WeightTensor]:
    for value in arguments.values():
        if isinstance(value, WeightTensor):
            yield value
