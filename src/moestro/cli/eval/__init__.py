"""`moestro eval`: measure how good the answers are. One file a question."""

import argparse
from types import ModuleType

from moestro.cli.eval import routing
from moestro.cli.parser import add_subcommands

HELP = "measure accuracy"
DESCRIPTION = "Measures of accuracy, each on a text that it names."

EVALUATIONS: tuple[ModuleType, ...] = (routing,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand for each evaluation."""
    add_subcommands(parser, EVALUATIONS, dest="evaluation", metavar="EVALUATION")
