"""Device: what the engine asks of a backend, beside the ops."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from moestro.core.hardware import HardwareSpec
from moestro.ops.routing import RouterWeights
from moestro.quant.format import WeightFormat, WeightTensor


class CapturedStep(Protocol):
    """A step of kernel calls over fixed memory; result is what it returned."""

    result: Any

    @property
    def num_calls(self) -> int:
        """Kernel calls of one replay."""

    def is_current(self) -> bool:
        """False when it has to be captured anew: kernels or threads have changed."""

    def replay(self) -> None:
        """Do all of it again, on what its inputs hold now."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


class GraphPool(Protocol):
    """Captures steps that share their intermediate memory: one result is valid at a time."""

    @property
    def num_bytes(self) -> int:
        """Memory that the captured steps share."""

    def capture(self, step: Callable[[], Any]) -> CapturedStep:
        """Run `step` and keep it. Raises UnsupportedError when it can't be captured."""

    def apart(self) -> "GraphPool":
        """A pool with memory of its own, whose steps may be replayed between this one's."""


class Device(Protocol):
    """One kind of device whose bodies are registered."""

    @property
    def name(self) -> str:
        """torch's device type: cpu, cuda or npu."""

    @property
    def identity(self) -> str:
        """Backend, ISA level and version of the kernels' numerics in one string.

        Equal strings give equal bits: it is part of everything that names a result.
        """

    @property
    def packs_weights(self) -> bool:
        """Whether its kernels read a packed layout of their own; else they read rows."""

    @property
    def packed_layout(self) -> str:
        """Names the packed layout: equal strings, the same bytes for the same weight."""

    def packed_bytes(
        self, weight_format: WeightFormat, shape: tuple[int, ...], *, paired: bool
    ) -> int:
        """Bytes of the packed buffer of a weight [M, K] or [E, M, K]."""

    def pack_rows(
        self, target: WeightTensor, rows: WeightTensor, *, expert: int | None, start: int
    ) -> None:
        """Write rows [start, start + n) of a packed weight, or of one expert of it.

        rows: [n, K] in the rows layout and the target's format.
        """

    def unpack(self, weight: WeightTensor) -> WeightTensor:
        """The rows layout of a packed weight, in fresh memory."""

    def hardware(self) -> HardwareSpec:
        """The machine as it is now: memory free, threads allowed, kernel level in use."""

    def set_num_threads(self, count: int) -> None:
        """Threads the kernels use from now on, at least 1. Changes speed, never bits."""

    def prepare_weights(self, weights: Iterable[torch.Tensor]) -> None:
        """Tell the device of weights that were allocated and not yet filled.

        It may lay them elsewhere for speed: the tensors stay, what they point to need not.
        """

    def pack_router(self, router: RouterWeights) -> RouterWeights:
        """The same router with its weight in the layout of this device's kernels as well."""

    def graph_pool(self) -> GraphPool | None:
        """What captures steps; None where this device can't."""
