"""Command-line flags, derived from the configuration classes.

Flags only collect text; the configuration classes check it, so that a flag, a YAML key and a
keyword give the same message. Only what the user wrote lands in the namespace.
"""

import argparse
from dataclasses import MISSING
from typing import Any

from moestro.config.engine import SERVER_OPTIONS, EngineConfig
from moestro.config.kinds import Choice, Integer, Kind, Object, Size, Switch, Words
from moestro.config.knob import Knob, knobs_of
from moestro.config.server import ServerConfig
from moestro.config.sources import own_options, read_yaml
from moestro.config.vllm_names import FOREIGN_NAMES
from moestro.errors import ConfigError, shown

_ENGINE_NAMES = frozenset(
    name for own, (_, option) in knobs_of(EngineConfig).items() for name in (own, *option.also)
) | frozenset(FOREIGN_NAMES)


def add_engine_flags(parser: argparse.ArgumentParser, *, positional_model: bool = False) -> None:
    """Add --config and a flag for each EngineConfig field; vLLM's other flags stay hidden.

    positional_model: also take MODEL as an argument, as `serve` and `chat` do.
    """
    if positional_model:
        parser.add_argument(
            "model_argument",
            metavar="MODEL",
            nargs="?",
            default=argparse.SUPPRESS,
            help="the same as --model",
        )
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file with options; flags win over it",
    )
    _add_flags(parser, EngineConfig)
    for name in FOREIGN_NAMES:
        parser.add_argument(
            flag_of(name),
            dest=name,
            nargs="?",
            const="true",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each ServerConfig field."""
    _add_flags(parser, ServerConfig)


def engine_config_from_args(args: argparse.Namespace) -> EngineConfig:
    """The configuration that flags and --config ask for. Raises ConfigError."""
    given = vars(args)
    flags = own_options(EngineConfig, {n: v for n, v in given.items() if n in _ENGINE_NAMES})
    model = given.get("model_argument")
    if model is not None:
        if flags.get("model", model) != model:
            raise ConfigError(
                f"The model is given twice: {shown(model)} and --model "
                f"{shown(flags['model'])}. Keep one."
            )
        flags["model"] = model
    path = given.get("config")
    if path is None:
        return EngineConfig(**flags)
    return EngineConfig.from_yaml(path, **flags)


def server_config_from_args(args: argparse.Namespace) -> ServerConfig:
    """The server's part of flags and --config. Raises ConfigError.

    Names in the file that are not the server's are left to engine_config_from_args.
    """
    given = vars(args)
    path = given.get("config")
    written = {} if path is None else read_yaml(path)
    file_part = {n: v for n, v in written.items() if n in SERVER_OPTIONS}
    flags = {n: v for n, v in given.items() if n in SERVER_OPTIONS}
    from_file = own_options(ServerConfig, file_part, where=f" in {path}")
    return ServerConfig(**from_file | own_options(ServerConfig, flags))


def flag_of(name: str) -> str:
    """The flag of an option: two dashes, dashes for underscores."""
    return "--" + name.replace("_", "-")


def _add_flags(parser: argparse.ArgumentParser, owner: type) -> None:
    groups: dict[str, Any] = {}
    for name, (described, option) in knobs_of(owner).items():
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        names = (*option.flags, flag_of(name), *(flag_of(also) for also in option.also))
        assert described.default is not MISSING
        groups[option.group].add_argument(
            *names,
            dest=name,
            default=argparse.SUPPRESS,
            help=_help(option, described.default),
            **_reading(option.kind),
        )


def _reading(kind: Kind) -> dict[str, Any]:
    """How argparse collects the text of a kind."""
    match kind:
        case Switch():
            return {"action": argparse.BooleanOptionalAction}
        case Words():
            return {"nargs": "+", "metavar": "NAME"}
        case Integer() | Size():
            return {"metavar": "N" if isinstance(kind, Integer) else "SIZE"}
        case Choice():
            return {"metavar": "|".join(kind.words)}
        case Object():
            return {"metavar": "JSON"}
        case _:
            return {"metavar": "VALUE"}


def _help(option: Knob, default: object) -> str:
    text = option.help
    if isinstance(default, bool):
        text += f" (default: {'on' if default else 'off'})"
    elif default not in (None, ()):
        text += f" (default: {default})"
    if option.waits_for is not None and option.ready == (default,):
        text += f" [not in this version: comes with {option.waits_for}]"
    return text.replace("%", "%%")
