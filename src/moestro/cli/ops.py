"""`moestro ops`: which body serves which op."""

import argparse
from typing import Any

from moestro.cli.console import add_common_flags, aligned, print_json, start_logging, write_text

HELP = "which kernel serves which op on this machine"
DESCRIPTION = (
    "The ops of the models, and the bodies that serve them on this machine, in the order tried. "
    "A body marked ? serves the calls its predicate takes; a call that no body takes is refused. "
    "One marked ~ does not keep the promise of the same bits whatever else is in the batch."
)
_LEGEND = {
    "?": "? serves the calls its predicate takes, a call that no body takes is refused",
    "~": "~ may give other bits when other requests share the batch",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moestro ops`."""
    add_common_flags(parser, json_help="print a JSON list, one object an op")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    start_logging(args)
    served = served_ops()
    if args.json:
        print_json(served)
    else:
        rows = [(op["op"], ", ".join(map(_label, op["bodies"])) or "-") for op in served]
        labels = "".join(label for _, label in rows)
        legend = [text for mark, text in _LEGEND.items() if mark in labels]
        write_text("\n".join([*aligned(rows), "", *legend]).rstrip() + "\n")
    return 0


def served_ops() -> list[dict[str, Any]]:
    """Every op by name, with its bodies in the order tried."""
    import moestro.backends.cpu  # noqa: F401  (registers its bodies)
    from moestro.ops.registry import all_ops

    return [
        {
            "op": op.name,
            "mutates": list(op.mutates),
            "bodies": [
                {
                    "device": device,
                    "body": body.name,
                    "conditional": body.when is not None,
                    "invariant": body.invariant,
                }
                for device, bodies in sorted(op.bodies.items())
                for body in bodies
            ],
        }
        for op in all_ops()
    ]


def _label(body: dict[str, Any]) -> str:
    marks = ("?" if body["conditional"] else "") + ("" if body["invariant"] else "~")
    name = body["body"]
    return f"{name if '.' in name else body['device'] + ' ' + name}{marks}"
