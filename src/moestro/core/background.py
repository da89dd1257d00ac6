"""What threads beside the model's own work have in common: they give way to it."""

import os
import threading
from contextlib import suppress

_NICE = 19


def lower_priority() -> None:
    """Of the calling thread alone, where the system can (Linux)."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
