"""Declaring ops, registering bodies, and choosing between them."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from moestro.errors import UnsupportedError
from moestro.ops import registry
from moestro.ops.registry import Op, implements


@dataclass(frozen=True)
class Pair:
    left: torch.Tensor
    right: int


def double(x: torch.Tensor, pair: Pair | None = None) -> torch.Tensor:
    """2 x."""
    return x * 2


@pytest.fixture
def op() -> Op:
    """An op that the registry doesn't list."""
    return Op(double, lambda: (), {}, ())


@pytest.fixture
def emptied() -> Iterator[None]:
    """The registry without its ops, for declarations."""
    kept = dict(registry._OPS)
    registry._OPS.clear()
    yield
    registry._OPS.clear()
    registry._OPS.update(kept)


def test_first_body_whose_predicate_holds_is_taken(op: Op) -> None:
    def narrow(x: torch.Tensor, pair: Pair | None = None) -> bool:
        return x.shape[0] < 3

    @implements(op, devices=("cpu",), when=narrow)
    def plus(x: torch.Tensor, pair: Pair | None = None) -> torch.Tensor:
        return x + 100

    @implements(op, devices=("cpu", "cuda"))
    def times(x: torch.Tensor, pair: Pair | None = None) -> torch.Tensor:
        return x * 3

    assert op(torch.ones(2)).tolist() == [101, 101]
    assert op(torch.ones(3)).tolist() == [3, 3, 3]
    assert [b.name.rsplit(".", 1)[1] for b in op.bodies["cpu"]] == ["plus", "times"]
    assert [b.fn for b in op.bodies["cuda"]] == [times]


def test_refusal_names_everything(op: Op) -> None:
    def only_empty(x: torch.Tensor, pair: Pair | None = None) -> bool:
        return x.numel() == 0

    @implements(op, devices=("cpu",), when=only_empty)
    def nothing(x: torch.Tensor, pair: Pair | None = None) -> torch.Tensor:
        return x

    strided = torch.ones((2, 6), dtype=torch.bfloat16)[:, ::2]
    with pytest.raises(UnsupportedError) as refused:
        op(strided, pair=Pair(torch.ones(4, dtype=torch.int64), 7))
    message = str(refused.value)
    for part in ("double", "cpu", "bfloat16[2, 3] strided", "int64[4]", "right=7"):
        assert part in message
    assert "nothing (refused by only_empty)" in message


def test_device_without_bodies_is_refused(op: Op) -> None:
    with pytest.raises(UnsupportedError, match=r"double .*on meta: none is registered"):
        op(torch.ones(2, device="meta"))


def test_reference_serves_only_where_allowed_and_last(op: Op) -> None:
    with pytest.raises(UnsupportedError):
        op(torch.ones(1))
    op.allow_reference("cpu", invariant=True)
    op.allow_reference("cpu", invariant=True)
    assert len(op.bodies["cpu"]) == 1
    assert op(torch.ones(1)).tolist() == [2]

    @implements(op, devices=("cpu",))
    def triple(x: torch.Tensor, pair: Pair | None = None) -> torch.Tensor:
        return x * 3

    assert op(torch.ones(1)).tolist() == [3]
    with pytest.raises(UnsupportedError, match="meta"):
        op(torch.ones(1, device="meta"))


def _renamed(y: torch.Tensor, pair: Pair | None = None) -> torch.Tensor:
    return y


def _longer(x: torch.Tensor, pair: Pair | None = None, more: int = 0) -> torch.Tensor:
    return x


def _other_default(x: torch.Tensor, pair: Pair | None = Pair) -> torch.Tensor:  # type: ignore
    return x


def _other_type(x: torch.Tensor, pair: int | None = None) -> torch.Tensor:
    return x


@pytest.mark.parametrize("body", [_renamed, _longer, _other_default, _other_type])
def test_other_signature_fails_when_registered(op: Op, body: object) -> None:
    with pytest.raises(TypeError, match="no body of double"):
        implements(op, devices=("cpu",))(body)  # type: ignore[arg-type]
    assert not op.bodies.get("cpu")


@pytest.mark.usefixtures("emptied")
def test_declaring_twice_fails() -> None:
    declare = registry.op(cases=lambda: ())
    made = declare(double)
    assert registry.all_ops() == [made]
    assert made.__doc__ == double.__doc__
    with pytest.raises(TypeError, match="declared twice"):
        declare(double)
