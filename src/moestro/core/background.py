"""What threads beside the model's own work have in common: they give way to it."""

import os
import threading
from contextlib import suppress

_NICE = 19


def lower_priority() -> None:
    """Of the calling thread alone, where the system can (Linux), to the lowest niceness. Not to be
    undone: the system asks for privileges to raise it again.

    Not SCHED_IDLE: a thread that holds the interpreter's lock, and gets no core because other
    processes fill them, stops the model for as long (docs/log.md).
    """
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
