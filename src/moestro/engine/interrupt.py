"""Ctrl-C between steps instead of inside one, where it would leave the engine in pieces."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Gives a function to call at safe points: it raises KeyboardInterrupt after a SIGINT.

    A second SIGINT raises at once. Does nothing outside the main thread, and where somebody else
    handles SIGINT.
    """
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not handled or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            signal.default_int_handler(number, frame)
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
