"""What the subcommands of `moestro kv` share: the store they open, and how they name things."""

import argparse
import contextlib
import io
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from moestro.cli.console import write_text
from moestro.errors import ConfigError, shown

if TYPE_CHECKING:
    from rich.table import Table

    from moestro.kvstore.backend import BlockingStore, Namespace

TIMEOUT_S = 30.0
DELETE_AT_ONCE = 256


def add_store_argument(parser: argparse.ArgumentParser) -> None:
    """STORE, as in --kv-store."""
    parser.add_argument(
        "store", metavar="STORE", help="lmdb://PATH, redis://HOST:PORT/DB or mooncake://..."
    )


@contextlib.contextmanager
def opened(args: argparse.Namespace) -> "Iterator[BlockingStore]":
    """The store that was named; it has to exist."""
    from moestro.kvstore.opening import open_existing

    store = open_existing(args.store, TIMEOUT_S)
    try:
        yield store
    finally:
        store.close()


def find_namespace(namespaces: "Iterable[Namespace]", text: str) -> "Namespace":
    """The one whose digest starts with `text`. Raises ConfigError for none or several."""
    found = [n for n in namespaces if n.digest.hex().startswith(text.lower())] if text else []
    if len(found) != 1:
        what = f"{len(found)} namespaces start" if found else "No namespace starts"
        raise ConfigError(f"{what} with {shown(text)}: moestro kv ls STORE lists them.")
    return found[0]


def delete_all(store: "BlockingStore", keys: Iterable[bytes]) -> int:
    """Delete in portions, so that engines come in between; how many were there."""
    from moestro.kvstore.backend import Deadline, runs

    return sum(store.delete(run, Deadline(TIMEOUT_S)) for run in runs(keys, DELETE_AT_ONCE))


def write_table(table: "Table") -> None:
    """To stdout as text, as wide as it needs to be where that is no terminal."""
    import sys

    from rich.console import Console

    width = None if sys.stdout.isatty() else 160
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
