"""The CPU as a device."""

from collections.abc import Iterable

import torch

import moestro.backends.cpu  # noqa: F401 -- registers the bodies
from moestro.backends.base import GraphPool
from moestro.backends.cpu import library
from moestro.core.hardware import HardwareSpec, probe_cpu
from moestro.ops.routing import RouterWeights
from moestro.quant.format import WeightFormat, WeightTensor

if library.has_native():
    from moestro.backends.cpu import packing

_OWN_MAPPING_BYTES = 2**25
"""From this size on an allocation is a mapping of its own and goes back whole. A smaller one may
lie in the heap, where large pages would outlive it and cost memory."""


class CpuDevice:
    """See backends.base.Device. One per process is as good as many: threads are shared."""

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def identity(self) -> str:
        return library.identity()

    @property
    def packs_weights(self) -> bool:
        return library.has_native()

    @property
    def packed_layout(self) -> str:
        return f"cpu-packed-v{packing.LAYOUT_VERSION}" if self.packs_weights else "rows"

    def packed_bytes(
        self, weight_format: WeightFormat, shape: tuple[int, ...], *, paired: bool
    ) -> int:
        return packing.packed_bytes(weight_format, shape, paired=paired)

    def pack_rows(
        self, target: WeightTensor, rows: WeightTensor, *, expert: int | None, start: int
    ) -> None:
        packing.pack_rows(target, rows, expert=expert, start=start)

    def unpack(self, weight: WeightTensor) -> WeightTensor:
        return packing.unpack(weight)

    def hardware(self) -> HardwareSpec:
        return probe_cpu(library.status().isa)

    def set_num_threads(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"threads must be at least 1, got {count}")
        if library.has_native():
            native = library.native()
            status = native.set_num_threads(count)
            if status:
                native.fail(status)

    def prepare_weights(self, weights: Iterable[torch.Tensor]) -> None:
        """Ask for large memory pages: decode reads every weight in turn and would miss the TLB."""
        if not library.has_native():
            return
        for weight in weights:
            if weight.nbytes > _OWN_MAPPING_BYTES:
                library.native().use_large_pages(weight.data_ptr(), weight.nbytes)

    def pack_router(self, router: RouterWeights) -> RouterWeights:
        if not library.has_native():
            return router
        from moestro.backends.cpu.routing import pack_router

        return pack_router(router)

    def graph_pool(self) -> GraphPool | None:
        if not library.has_native():
            return None
        from moestro.backends.cpu import graph

        return graph.GraphPool()
