"""Backends: the bodies of the ops on each kind of device. Importing one registers its bodies."""

from moestro.backends.base import Device
from moestro.errors import UnsupportedError


def load_backend(device: str) -> Device:
    """Register the bodies of `device` (cpu). Raises UnsupportedError or ConfigError."""
    if device == "cpu":
        from moestro.backends.cpu.device import CpuDevice

        return CpuDevice()
    raise UnsupportedError(
        f"device {device!r} has no bodies in this build: the one that has is 'cpu'."
    )
