"""What the machine can do at most, as `moestro bench machine` measures it, for bounds."""

from dataclasses import dataclass

from moestro.cli.bench.machine import MachineLimits, measure_machine
from moestro.cli.bench.statistics import median
from moestro.core.hardware import probe_cpu

RUNS = 5


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes a second that are read; operations a second, a multiply-add as two.

    Where the level has no bf16 or int8 instruction, its products run at the fp32 peak.
    """

    read_bytes_per_s: float
    fp32_flops_per_s: float
    bf16_flops_per_s: float
    int8_ops_per_s: float

    @classmethod
    def of(cls, measured: MachineLimits) -> "Limits":
        """From billions a second."""
        fp32 = measured.fp32_gflops
        return cls(
            measured.read_gbps * 1e9,
            fp32 * 1e9,
            (measured.bf16_gflops or fp32) * 1e9,
            (measured.int8_gops or fp32) * 1e9,
        )


def measure_limits(threads: int) -> Limits:
    """All limits with `threads` threads; two seconds."""
    return Limits.of(measure_machine(threads))


def read_bandwidth() -> float:
    """Bytes a second that the library's threads read now: the median of five short runs."""
    from moestro.backends.cpu import machine

    size = machine.read_buffer_bytes(probe_cpu().available_bytes)
    return median(machine.read_rates(size, RUNS))
