"""`moestro kv ls`: the namespaces of a store, or the pages of one."""

import argparse

from moestro.cli.console import add_common_flags, print_json, start_logging, write_text
from moestro.cli.kv.store import add_store_argument, find_namespace, opened, write_table

HELP = "list the namespaces, or the pages of one"
DESCRIPTION = "Lists the namespaces in a store with their pages and bytes, or one's page hashes."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moestro kv ls`."""
    add_store_argument(parser)
    parser.add_argument(
        "namespace",
        metavar="NAMESPACE",
        nargs="?",
        help="list the pages of the namespace whose digest starts so",
    )
    add_common_flags(parser, json_help="print a JSON list")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the list."""
    start_logging(args)
    with opened(args) as store:
        namespaces = sorted(store.namespaces(), key=lambda n: (-n.num_bytes, n.digest))
        if args.namespace is not None:
            digest = find_namespace(namespaces, args.namespace).digest
            pages = [key[len(digest) :].hex() for key in store.scan(digest)]
            if args.json:
                print_json(pages)
            else:
                write_text("".join(f"{page}\n" for page in pages))
            return 0
    if args.json:
        rows = [
            {"namespace": n.digest.hex(), "num_pages": n.num_pages, "num_bytes": n.num_bytes}
            for n in namespaces
        ]
        print_json(rows)
        return 0
    from rich.table import Table

    from moestro.planner.units import gigabytes

    table = Table("namespace", box=None)
    for title in ("pages", "bytes", "bytes a page"):
        table.add_column(title, justify="right")
    for n in namespaces:
        each = gigabytes(n.num_bytes // n.num_pages)
        table.add_row(n.digest.hex(), f"{n.num_pages:,}", gigabytes(n.num_bytes), each)
    write_table(table)
    return 0
