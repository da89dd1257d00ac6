"""Standard streams that whoever started the command has closed."""

import os
import sys


def open_missing_streams() -> None:
    """Put something in the place of closed standard streams.

    Else the next file opened would take their descriptor, and what a library prints would end up
    in it. Reading finds the end of input, notes are dropped, writing a result is an error.
    """
    if sys.stdin is None:
        sys.stdin = open(_open_null(os.O_RDONLY), encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(_open_null(os.O_RDONLY), "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(_open_null(os.O_WRONLY), "w", encoding="utf-8")  # noqa: SIM115


def _open_null(flags: int) -> int:
    return os.open(os.devnull, flags)
