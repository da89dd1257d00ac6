"""StepTimes: when the device and when the host worked on a step, for whoever watches."""

from collections.abc import Callable
from typing import NamedTuple

Interval = tuple[float, float]
"""When it began and when it ended, in seconds of the engine's clock."""


class StepTimes(NamedTuple):
    """One step. device: (0, 0) where the runner has no clock; it is the same clock as the host's.

    planned: the host made its schedule. applied: it took the output in, up to text and stop
    strings. Outside of both, and of those of other steps, Engine.step has waited, or its caller
    has had its turn.
    """

    step_id: int
    num_sequences: int
    num_tokens: int
    planned: Interval
    device: Interval
    applied: Interval


StepObserver = Callable[[StepTimes], None]
