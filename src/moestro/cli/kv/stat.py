"""`moestro kv stat`: how full a store is."""

import argparse
from typing import Any

from moestro.cli.console import (
    add_common_flags,
    aligned,
    print_json,
    start_logging,
    write_text,
)
from moestro.cli.kv.store import add_store_argument, opened

HELP = "how full a store is"
DESCRIPTION = (
    "Pages, bytes and budget of a store. The file of an LMDB store keeps the size it once had; "
    "moestro kv gc gives free space back."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moestro kv stat`."""
    add_store_argument(parser)
    add_common_flags(parser, json_help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the figures."""
    from moestro.planner.units import gigabytes

    start_logging(args)
    facts = _facts(args)
    if args.json:
        print_json(facts)
        return 0
    shown = {
        name: f"{value:,}" if name.startswith("num") else gigabytes(value)
        for name, value in facts.items()
        if isinstance(value, int)
    }
    write_text("\n".join(aligned((name.replace("_", " "), v) for name, v in shown.items())) + "\n")
    return 0


def _facts(args: argparse.Namespace) -> dict[str, Any]:
    from moestro.kvstore.lmdb_store import HIGH_WATER, LmdbStore

    with opened(args) as store:
        namespaces = store.namespaces()
        facts: dict[str, Any] = {
            "store": args.store.partition("://")[0],
            "num_namespaces": len(namespaces),
            "num_pages": sum(n.num_pages for n in namespaces),
            "value_bytes": sum(n.num_bytes for n in namespaces),
        }
        if isinstance(store, LmdbStore):
            facts["used_bytes"] = store.totals()[0]
            facts["file_bytes"] = store.file_bytes()
            facts["capacity_bytes"] = store.capacity_bytes
            facts["evicts_above_bytes"] = int(HIGH_WATER * store.capacity_bytes)
    return facts
