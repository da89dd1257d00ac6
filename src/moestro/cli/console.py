"""What the subcommands share of the terminal: JSON on stdout, everything else on stderr."""

import argparse
import contextlib
import errno
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from moestro.log import setup_logging


def add_common_flags(
    parser: argparse.ArgumentParser, *, json_help: str | None = None, log_level: bool = True
) -> None:
    """--debug, --log-level and, where there is something to print as JSON, --json."""
    group = parser.add_argument_group("Output")
    if json_help is not None:
        group.add_argument("--json", action="store_true", help=json_help)
    if log_level:
        group.add_argument(
            "--log-level",
            metavar="debug|info|warning|error",
            help="least severe log lines shown (default: MOESTRO_LOG_LEVEL, else info)",
        )
    group.add_argument(
        "--debug", action="store_true", help="debug log lines, and tracebacks of errors"
    )


def start_logging(
    args: argparse.Namespace, level: str | None = None, *, plain: bool = False
) -> None:
    """Logs to stderr at the level that the flags ask for. Raises ConfigError."""
    if level is None:
        level = getattr(args, "log_level", None)
    setup_logging("debug" if args.debug else level, plain=plain and not args.debug)


def print_json(value: object) -> None:
    """One JSON document on stdout, in UTF-8 whatever the terminal's encoding."""
    text = json.dumps(as_json(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    _write(text.encode("utf-8", "backslashreplace"))


def as_json(value: object) -> Any:
    """Plain JSON values: dataclasses become objects, keys text, infinities and NaN null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): as_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, int):
        return value
    return str(value)


def write_text(text: str) -> None:
    """Text to stdout at once; what the terminal can't show becomes an escape."""
    _write(text.encode(sys.stdout.encoding or "utf-8", "backslashreplace"))


def note(text: str) -> None:
    """A line for the person at the terminal, on stderr; a lost one is no failure."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _write(data: bytes) -> None:
    """All of it to stdout, or an OSError."""
    stream = sys.stdout
    stream.flush()
    buffer = getattr(stream, "buffer", None)
    if buffer is None:
        stream.write(data.decode("utf-8"))
        return
    rest = memoryview(data)
    while rest:
        written = buffer.write(rest)  # under python -u not all: the disk is full, say
        if written is None:
            raise BlockingIOError(errno.EAGAIN, "stdout takes no more: it does not block")
        rest = rest[written:]
    buffer.flush()


def aligned(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Two columns as lines."""
    listed = list(rows)
    width = max((len(left) for left, _ in listed), default=0)
    return [f"{left:<{width}}  {right}".rstrip() for left, right in listed]
