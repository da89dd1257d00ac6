"""The CPU as a device."""

import mmap
from collections.abc import Iterable
from contextlib import suppress

import torch

import moestro.backends.cpu  # noqa: F401 -- registers the bodies
from moestro.backends.base import GraphPool
from moestro.backends.cpu import library
from moestro.core.hardware import HardwareSpec, probe_cpu
from moestro.ops.routing import RouterWeights
from moestro.quant.format import WeightFormat, WeightTensor

if library.has_native():
    from moestro.backends.cpu import packing

_ALIGNMENT = 4096


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
        """Lay all of them into one mapping of large memory pages.

        Decode reads every weight in turn: with small pages it waits for the TLB. One mapping,
        because most weights are no whole number of large pages, and because it goes back whole,
        which a heap does not.
        """
        held = [(w, w.shape, w.dtype, w.nbytes) for w in weights if w.nbytes]
        if not held or not library.has_native():
            return
        for weight, *_ in held:
            weight.untyped_storage().resize_(0)  # so that no weight is there twice
        offsets = [0]
        for *_, num_bytes in held:
            offsets.append(offsets[-1] + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
        mapping = _large_pages(offsets.pop())
        for (weight, shape, dtype, num_bytes), offset in zip(held, offsets, strict=True):
            data = torch.frombuffer(mapping, dtype=torch.uint8, count=num_bytes, offset=offset)
            view = data.view(dtype).view(shape)
            weight.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())

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


def _large_pages(num_bytes: int) -> mmap.mmap:
    """Zeros, backed by 2 MiB pages where the system has them. Raises MemoryError."""
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {num_bytes} bytes of weights: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
