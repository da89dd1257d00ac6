"""SIGTERM as an orderly end: what is open is closed, so that pending KV pages are written."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_TERMINATED = 128 + signal.SIGTERM


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Within, SIGTERM raises SystemExit. Does nothing where somebody else handles it."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
