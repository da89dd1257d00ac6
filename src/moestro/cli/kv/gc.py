"""`moestro kv gc`: drop what is not wanted any more, and give its space back."""

import argparse

from moestro.cli.console import add_common_flags, print_json, start_logging, write_text
from moestro.cli.kv.store import (
    TIMEOUT_S,
    add_store_argument,
    delete_all,
    find_namespace,
    opened,
)
from moestro.errors import ConfigError, shown

HELP = "drop other namespaces, shrink to a size, give free space back"
DESCRIPTION = (
    "Drops the namespaces that are not to be kept, then the pages used longest ago until an LMDB "
    "store takes at most so much, then rewrites its file without free space. The last needs that "
    "no engine has the store open, and room for a second copy of what is left."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moestro kv gc`."""
    add_store_argument(parser)
    parser.add_argument(
        "--keep",
        metavar="NAMESPACE",
        action="append",
        help="drop all namespaces but those whose digests start so (may be repeated)",
    )
    parser.add_argument("--to", metavar="SIZE", help="evict down to so many bytes (LMDB)")
    add_common_flags(parser, json_help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Drop, evict, compact; print what was done."""
    from moestro.config.kinds import Size
    from moestro.kvstore.backend import Deadline
    from moestro.kvstore.lmdb_store import LmdbStore
    from moestro.planner.units import gigabytes

    start_logging(args)
    try:
        limit = None if args.to is None else Size().parse(args.to)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--to is {shown(args.to)}, but must be {Size().expects}.") from error
    with opened(args) as store:
        if limit is not None and not isinstance(store, LmdbStore):
            raise ConfigError("--to is for LMDB stores: other stores have their server's budget.")
        namespaces = store.namespaces()
        kept = {find_namespace(namespaces, text).digest for text in args.keep or ()}
        dropped = [n.digest for n in namespaces if kept and n.digest not in kept]
        num_pages = sum(delete_all(store, store.scan(digest)) for digest in dropped)
        compacted, file_bytes = False, None
        if isinstance(store, LmdbStore):
            if limit is not None:
                num_pages += store.shrink(limit, Deadline(TIMEOUT_S))
            compacted = store.compact(Deadline(TIMEOUT_S))
            file_bytes = store.file_bytes()
    if args.json:
        print_json(
            {"dropped_namespaces": [d.hex() for d in dropped], "num_deleted": num_pages,
             "compacted": compacted, "file_bytes": file_bytes}
        )  # fmt: skip
        return 0
    lines = [f"{len(dropped)} namespaces dropped, {num_pages:,} pages deleted"]
    if file_bytes is not None:
        state = "compacted" if compacted else "not compacted: another process has the store open"
        lines.append(f"the file has {gigabytes(file_bytes)} ({state})")
    write_text("\n".join(lines) + "\n")
    return 0
