"""`moestro kv verify`: read every page and compare its checksum."""

import argparse

from moestro.cli.bench.report import progress
from moestro.cli.console import add_common_flags, print_json, start_logging, write_text
from moestro.cli.kv.store import TIMEOUT_S, add_store_argument, delete_all, opened

HELP = "read every page and compare its checksum"
DESCRIPTION = (
    "Reads every page of a store, all namespaces, and makes the checks that an engine makes. "
    "Opening an LMDB store that nobody else uses checks its structure too. Fails when a page is "
    "corrupt and --delete is not given."
)

PAGES_AT_ONCE = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moestro kv verify`."""
    add_store_argument(parser)
    parser.add_argument("--delete", action="store_true", help="delete the pages that are corrupt")
    add_common_flags(parser, json_help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what was found; 1 when corrupt pages are left."""
    from moestro.kvstore import codec
    from moestro.kvstore.backend import Deadline, runs
    from moestro.planner.units import gigabytes

    start_logging(args)
    num_right, num_bytes, num_gone = 0, 0, 0
    corrupt: dict[bytes, str] = {}
    with opened(args) as store:
        keys = list(store.scan(b""))
        with progress("verifying", len(keys)) as advance:
            for run in runs(keys, PAGES_AT_ONCE):
                for key, value in zip(run, store.get_many(run, Deadline(TIMEOUT_S)), strict=True):
                    advance()
                    if value is None:
                        num_gone += 1  # evicted meanwhile
                        continue
                    digest, page_hash = key[: codec.DIGEST_BYTES], key[codec.DIGEST_BYTES :]
                    try:
                        num_bytes += codec.unseal(value, digest, page_hash).nbytes
                        num_right += 1
                    except codec.CorruptValueError as error:
                        corrupt[key] = error.check.value
        num_deleted = delete_all(store, corrupt) if args.delete else 0
    if args.json:
        listed = [
            {"namespace": k[: codec.DIGEST_BYTES].hex(), "page": k[codec.DIGEST_BYTES :].hex(),
             "failed_check": check}
            for k, check in corrupt.items()
        ]  # fmt: skip
        print_json(
            {"num_right": num_right, "payload_bytes": num_bytes, "num_gone": num_gone,
             "num_deleted": num_deleted, "corrupt": listed}
        )  # fmt: skip
    else:
        lines = [f"{key.hex()}: {check}" for key, check in corrupt.items()]
        lines.append(
            f"{num_right:,} pages of {gigabytes(num_bytes)} are right, {len(corrupt):,} corrupt, "
            f"{num_deleted:,} of these deleted"
        )
        write_text("\n".join(lines) + "\n")
    return 1 if len(corrupt) > num_deleted else 0
