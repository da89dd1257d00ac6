"""Ops and their bodies: one reference function per op, any number of bodies, chosen by tensor.

The reference is the specification. A backend adds bodies with @implements; a call takes the first
body of the tensor's device whose predicate holds, and refuses loudly when there is none.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from moestro.errors import UnsupportedError

Predicate = Callable[..., bool]


@dataclass(frozen=True, slots=True)
class Body:
    """One implementation of an op on one kind of device.

    invariant: keeps the promise of the same bits for a row whatever else is in the batch.
    """

    name: str
    device: str
    fn: Callable[..., Any]
    when: Predicate | None
    invariant: bool


class Op:
    """A named operation: its reference, and the bodies that serve it, in the order tried.

    The first parameter must be a tensor: its device decides. `cases` yields conformance cases
    (see ops.testing), `tol` maps a dtype to (rtol, atol) and overrides the defaults there,
    `mutates` names the parameters changed in place.
    """

    def __init__(
        self,
        reference: Callable[..., Any],
        cases: Callable[[], Iterable[Any]],
        tol: Mapping[torch.dtype, tuple[float, float]],
        mutates: tuple[str, ...],
    ) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.signature = inspect.signature(reference)
        self.cases = cases
        self.tol = dict(tol)
        self.mutates = mutates
        self.bodies: dict[str, list[Body]] = {}
        self.__doc__ = reference.__doc__
        self.__wrapped__ = reference

    def __call__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for body in self.bodies.get(tensor.device.type, ()):
            if body.when is None or body.when(tensor, *args, **kwargs):
                return body.fn(tensor, *args, **kwargs)
        raise UnsupportedError(self._refusal(tensor, args, kwargs))

    def allow_reference(self, device: str, *, invariant: bool) -> None:
        """Let the reference serve on `device`, after every body registered for it."""
        served = self.bodies.setdefault(device, [])
        if all(b.fn is not self.reference for b in served):
            served.append(Body("reference", device, self.reference, None, invariant))

    def add(self, body: Body) -> None:
        """Register a body, ahead of the reference and behind earlier bodies."""
        theirs = inspect.signature(body.fn)
        if theirs != self.signature:
            raise TypeError(
                f"{body.name} is no body of {self.name}: its signature {theirs} differs from "
                f"{self.signature}"
            )
        served = self.bodies.setdefault(body.device, [])
        at = next((i for i, b in enumerate(served) if b.fn is self.reference), len(served))
        served.insert(at, body)

    def _refusal(self, tensor: torch.Tensor, args: Any, kwargs: Any) -> str:
        device = tensor.device.type
        given = [_describe(a) for a in (tensor, *args)]
        given += [f"{k}={_describe(v)}" for k, v in kwargs.items()]
        served = self.bodies.get(device, [])
        why = ", ".join(f"{b.name} (refused by {getattr(b.when, '__name__', '')})" for b in served)
        return (
            f"no body of op {self.name} takes ({', '.join(given)}) on {device}: "
            f"{why or 'none is registered for this device'}"
        )


_OPS: dict[str, Op] = {}


def op(
    *,
    cases: Callable[[], Iterable[Any]],
    tol: Mapping[torch.dtype, tuple[float, float]] | None = None,
    mutates: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Op]:
    """Declare a function as the reference of an op of the same name."""

    def declare(reference: Callable[..., Any]) -> Op:
        made = Op(reference, cases, tol or {}, mutates)
        if made.name in _OPS:
            raise TypeError(f"op {made.name} is declared twice")
        _OPS[made.name] = made
        return made

    return declare


def implements(
    target: Op, *, devices: tuple[str, ...], when: Predicate | None = None, invariant: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a body of `target` on `devices`.

    `when` gets the call's arguments and looks at dtypes, shapes and layouts only.
    """

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        name = f"{fn.__module__.removeprefix('moestro.backends.')}.{fn.__name__}"
        for device in devices:
            target.add(Body(name, device, fn, when, invariant))
        return fn

    return register


def all_ops() -> list[Op]:
    """Every declared op, by name."""
    return [_OPS[name] for name in sorted(_OPS)]


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        layout = "" if value.is_contiguous() else " strided"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{layout}"
    if is_dataclass(value) and not isinstance(value, type):
        parts = [f"{f.name}={_describe(getattr(value, f.name))}" for f in fields(value)]
        return f"{type(value).__name__}({', '.join(parts)})"
    return repr(value)
