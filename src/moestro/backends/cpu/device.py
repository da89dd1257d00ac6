"""The CPU as a device."""

import moestro.backends.cpu  # noqa: F401 -- registers the bodies
from moestro.backends.cpu import library
from moestro.core.hardware import HardwareSpec, probe_cpu


class CpuDevice:
    """See backends.base.Device. One per process is as good as many: threads are shared."""

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def identity(self) -> str:
        return library.identity()

    def hardware(self) -> HardwareSpec:
        return probe_cpu(library.status().isa)

    def set_num_threads(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"threads must be at least 1, got {count}")
        if library.has_native():
            library.native().set_num_threads(count)
