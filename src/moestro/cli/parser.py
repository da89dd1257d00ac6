"""The argument parser of every command: an unknown flag is answered in one line, with the nearest.

argparse's own answer comes from the outermost parser: its usage, no word about the command.
"""

import argparse
import difflib
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from moestro.errors import ConfigError, shown


class Parser(argparse.ArgumentParser):
    """Raises ConfigError for arguments that nothing takes; subcommands inherit the class."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """The namespace and an empty list."""
        namespace, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            raise ConfigError(self._refusal(unknown))
        return namespace, unknown

    def _refusal(self, unknown: Sequence[str]) -> str:
        flags = [text.partition("=")[0][:100] for text in unknown if text.startswith("-")]
        if not flags:
            return f"{shown(unknown[0])} is one argument too many for {self.prog}."
        near = difflib.get_close_matches(flags[0], self._option_string_actions, n=1, cutoff=0.7)
        hint = f" Did you mean {near[0]}?" if near else ""
        return f"{self.prog} has no option {flags[0]}.{hint} {self.prog} --help lists them all."


def add_subcommands(
    parser: argparse.ArgumentParser, modules: Iterable[ModuleType], *, dest: str, metavar: str
) -> None:
    """One subcommand a module, under the module's own name; each has HELP, DESCRIPTION and
    add_arguments.
    """
    commands = parser.add_subparsers(dest=dest, metavar=metavar, required=True)
    for module in modules:
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(
            name, help=module.HELP, description=module.DESCRIPTION, allow_abbrev=False
        )
        module.add_arguments(command)
