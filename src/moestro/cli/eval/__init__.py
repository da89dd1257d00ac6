"""`moestro eval`: measure how good the answers are. One file a question."""

import argparse
from types import ModuleType

from moestro.cli.eval import routing

HELP = "measure accuracy"
DESCRIPTION = "Measures of accuracy, each on a text that it names."

EVALUATIONS: tuple[ModuleType, ...] = (routing,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand for each evaluation."""
    evaluations = parser.add_subparsers(dest="evaluation", metavar="EVALUATION", required=True)
    for module in EVALUATIONS:
        name = module.__name__.rpartition(".")[2]
        command = evaluations.add_parser(
            name, help=module.HELP, description=module.DESCRIPTION, allow_abbrev=False
        )
        module.add_arguments(command)
