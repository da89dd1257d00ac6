"""`moestro kv`: look into a KV store, check it, tidy it up. One file a subcommand."""

import argparse
from types import ModuleType

from moestro.cli.kv import drop, explain, gc, ls, stat, verify
from moestro.cli.parser import add_subcommands

HELP = "look into a KV store, check it and tidy it up"
DESCRIPTION = (
    "Works on a store while engines use it, and loads no model. A namespace is everything that "
    "makes KV pages comparable: one model with one set of weights, one quantisation, one kind of "
    "device and so on; an engine writes to one."
)

COMMANDS: tuple[ModuleType, ...] = (ls, stat, verify, explain, gc, drop)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand for each task."""
    add_subcommands(parser, COMMANDS, dest="kv_command", metavar="TASK")
