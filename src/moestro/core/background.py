"""What threads beside the model's own work have in common: they give way to it."""

import os
import threading
from contextlib import suppress

_NICE = 19


def lower_priority() -> None:
    """Of the calling thread alone, where the system can (Linux): it runs where nothing else wants
    to. Not to be undone: the system asks for privileges to raise it again.
    """
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        return
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
