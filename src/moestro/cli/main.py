"""`moestro`: choose the subcommand, run it, and tell what went wrong in one line."""

import argparse
import contextlib
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from moestro import envs
from moestro.cli import bench, chat, doctor, generate, kv, ops, plan, serve
from moestro.cli import eval as evaluate
from moestro.cli.console import write_text
from moestro.cli.parser import Parser, add_subcommands
from moestro.cli.standard_streams import open_missing_streams
from moestro.cli.termination import exit_on_sigterm
from moestro.errors import ConfigError, MoestroError, RequestError

EXIT_FAILED = 1
EXIT_USER_MISTAKE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

# fmt: off
SUBCOMMANDS: tuple[ModuleType, ...] = (
    generate, chat, serve, plan, ops, doctor, kv, bench, evaluate,
)
# fmt: on

DESCRIPTION = (
    "Inference engine for long-context sparse-MoE language models. Without a model, the one that "
    "ships with the package (tiny-hy3) is used."
)


def build_parser() -> argparse.ArgumentParser:
    """All subcommands and flags."""
    parser = Parser(prog="moestro", description=DESCRIPTION)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    add_subcommands(parser, SUBCOMMANDS, dest="command", metavar="COMMAND")
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked: the metadata is slow to read."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from moestro import __version__

        write_text(f"moestro {__version__}\n")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code says how it ended.

    0 done; 1 failed; 2 a mistake in what was asked; 130 interrupted; 141 nobody read the output;
    143 (raised) terminated.
    """
    open_missing_streams()
    args = argparse.Namespace()
    try:
        args = build_parser().parse_args(argv)
        args.command_line = shlex.join(["moestro", *(sys.argv[1:] if argv is None else argv)])
        with exit_on_sigterm():
            code = int(args.run(args))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return EXIT_BROKEN_PIPE
    except MoestroError as error:
        return _report(args, error, str(error))
    except OSError as error:
        _discard_output()
        return _report(args, error, f"{error.strerror or error}{_of_file(error)}")
    except Exception as error:
        return _report(args, error, _of_unforeseen(error))
    return code


def _of_unforeseen(error: Exception) -> str:
    """What to say of an exception that nothing below was prepared for."""
    if isinstance(error, ImportError):
        return f"a library can't be loaded: {error}. moestro doctor looks at the installation."
    # torch raises a RuntimeError of its own
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return f"out of memory ({error!r}). moestro plan MODEL --fit says what fits."
    return f"unexpected {type(error).__name__}: {error} (a bug; --debug shows where)"


def _report(args: argparse.Namespace, error: Exception, message: str) -> int:
    """Write the error to stderr, with its traceback when debugging; the exit code."""
    if _debugging(args):
        traceback.print_exception(error)
    with contextlib.suppress(OSError):
        print(f"moestro: error: {_one_line(message)}", file=sys.stderr)
    is_mistake = isinstance(error, ConfigError | RequestError)
    return EXIT_USER_MISTAKE if is_mistake else EXIT_FAILED


def _one_line(message: str) -> str:
    """Without line ends, and with escapes for what would steer the terminal."""
    line = " ".join(message.split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def _debugging(args: argparse.Namespace) -> bool:
    if getattr(args, "debug", False):
        return True
    try:
        return envs.LOG_LEVEL.get() == "debug"
    except ConfigError:
        return False


def _of_file(error: OSError) -> str:
    return f": {error.filename}" if error.filename else ""


def _discard_output() -> None:
    """Point stdout elsewhere, so that flushing it at exit can't fail a second time."""
    with contextlib.suppress(OSError, ValueError):
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        os.close(sink)


if __name__ == "__main__":
    sys.exit(main())
