"""The command line as data: for docs/cli.md, and for the list of flags that a test keeps."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from moestro.cli.main import DESCRIPTION, build_parser

INTRODUCTION = f"""# Command line

<!-- Written by scripts/docs from the parsers in src/moestro/cli; edit those. -->

{DESCRIPTION}

Options of the engine and of the server can stand in a YAML file given with `--config`; flags win
over it. With `--json`, stdout holds the JSON and nothing else; progress and logs go to stderr.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | failed: the checkpoint, the machine or the program |
| 2 | a mistake in what was asked: a flag, a value, a prompt |
| 130 | interrupted |
| 141 | nobody read the output any more |

An error is one line on stderr; `--debug` (or `MOESTRO_LOG_LEVEL=debug`) adds the traceback.
"""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag or argument. names: every spelling; value: what follows it, "" for a switch."""

    group: str
    names: tuple[str, ...]
    value: str
    help: str


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand, as in "moestro bench throughput"."""

    name: str
    description: str
    flags: tuple[Flag, ...]


def commands() -> list[Command]:
    """All subcommands that run something, in the order of --help."""
    return list(_commands(build_parser(), "moestro"))


def flag_list() -> str:
    """Every flag of every command, one a line, in a stable order."""
    lines = [
        f"{command.name} {' '.join(filter(None, (name, flag.value)))}"
        for command in commands()
        for flag in command.flags
        for name in flag.names
    ]
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    """docs/cli.md."""
    parts = [INTRODUCTION]
    for command in commands():
        parts.append(f"## {command.name}\n\n{command.description}\n")
        group = None
        for flag in command.flags:
            if flag.group != group:
                group = flag.group
                parts.append(f"**{group}**\n\n| flag | meaning |\n|---|---|")
            parts.append(f"| {_spelling(flag)} | {_cell(flag.help)} |")
            if flag is command.flags[-1] or _next(command, flag).group != group:
                parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _next(command: Command, flag: Flag) -> Flag:
    return command.flags[command.flags.index(flag) + 1]


def _spelling(flag: Flag) -> str:
    names = [f"{name} {flag.value}".strip() for name in flag.names]
    return ", ".join(f"`{_cell(name)}`" for name in names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _commands(parser: argparse.ArgumentParser, name: str) -> Iterator[Command]:
    # argparse has no public way to list what a parser holds; these names have not changed
    # since Python 2.7.
    nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not nested:
        yield Command(name, parser.description or "", tuple(_flags(parser)))
    for action in nested:
        for word, command in action.choices.items():
            yield from _commands(command, f"{name} {word}")


def _flags(parser: argparse.ArgumentParser) -> Iterator[Flag]:
    for group in parser._action_groups:
        title = {"positional arguments": "Arguments", "options": "Options"}.get(
            group.title or "", group.title or ""
        )
        for action in group._group_actions:
            if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
                continue
            names = tuple(action.option_strings) or (str(action.metavar or action.dest),)
            yield Flag(title, names, _value_of(action), (action.help or "") % {})


def _value_of(action: argparse.Action) -> str:
    if action.nargs == 0 or not action.option_strings:
        return ""
    value = str(action.metavar or action.dest.upper())
    return f"{value} ..." if action.nargs == "+" else value
