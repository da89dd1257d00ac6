"""`moestro kv`: look into a KV store, check it, tidy it up. One file a subcommand."""

import argparse
from types import ModuleType

from moestro.cli.kv import drop, explain, gc, ls, stat, verify

HELP = "look into a KV store, check it and tidy it up"
DESCRIPTION = (
    "Works on a store while engines use it, and loads no model. A namespace is everything that "
    "makes KV pages comparable: one model with one set of weights, one quantisation, one kind of "
    "device and so on; an engine writes to one."
)

COMMANDS: tuple[ModuleType, ...] = (ls, stat, verify, explain, gc, drop)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand for each task."""
    commands = parser.add_subparsers(dest="kv_command", metavar="TASK", required=True)
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(
            name, help=module.HELP, description=module.DESCRIPTION, allow_abbrev=False
        )
        module.add_arguments(command)
