"""`moestro kv drop`: delete a namespace."""

import argparse

from moestro.cli.console import add_common_flags, print_json, start_logging, write_text
from moestro.cli.kv.store import add_store_argument, delete_all, find_namespace, opened
from moestro.errors import ConfigError

HELP = "delete a namespace"
DESCRIPTION = (
    "Deletes every page of a namespace, or of all. An engine that uses it computes the pages "
    "again; moestro kv gc gives the space back."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moestro kv drop`."""
    add_store_argument(parser)
    parser.add_argument(
        "namespace",
        metavar="NAMESPACE",
        nargs="?",
        help="the one whose digest starts so",
    )
    parser.add_argument("--all", action="store_true", help="every namespace")
    add_common_flags(parser, json_help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Delete the pages and say how many."""
    start_logging(args)
    if args.all == (args.namespace is not None):
        raise ConfigError("Name a NAMESPACE to drop, or say --all.")
    with opened(args) as store:
        digest = b"" if args.all else find_namespace(store.namespaces(), args.namespace).digest
        num_pages = delete_all(store, store.scan(digest))
    if args.json:
        print_json({"num_deleted": num_pages})
    else:
        write_text(f"{num_pages:,} pages deleted\n")
    return 0
