"""From what a user wrote (keywords, a YAML file) to options under their own names."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from moestro.config.knob import knobs_of, unknown_option
from moestro.config.vllm_names import FOREIGN_NAMES
from moestro.errors import ConfigError, shown


def own_options(
    owner: type,
    options: Mapping[str, Any],
    *,
    where: str = "",
    ignore: Collection[str] = (),
) -> dict[str, Any]:
    """`options` under the names of `owner`'s fields, without those that mean "default" (None).

    Other names of an option are translated, harmless foreign ones dropped, `ignore` skipped.
    `where` tells in messages which file it was. Raises ConfigError for a name that is none, for
    a foreign one with a value that can't be had, and for one option given twice.
    """
    known = knobs_of(owner)
    renamed = {also: name for name, (_, option) in known.items() for also in option.also}
    found: dict[str, Any] = {}
    spelling: dict[str, str] = {}
    for written, value in options.items():
        name = renamed.get(written, written)
        if name in known:
            if name in found and found[name] != value:
                raise ConfigError(
                    f"{spelling[name]}={shown(found[name])} and {written}={shown(value)}{where} "
                    "are the same option with different values: keep one."
                )
            if value is not None:
                found[name], spelling[name] = value, written
        elif written in FOREIGN_NAMES:
            _check_foreign(written, value, where)
        elif written not in ignore:
            raise unknown_option(written, [*known, *renamed, *ignore], where)
    return found


def _check_foreign(name: str, value: object, where: str) -> None:
    foreign = FOREIGN_NAMES[name]
    if value is None or value in foreign.harmless:
        return
    words = {str(item).lower() for item in foreign.harmless}
    if isinstance(value, str) and value.lower() in words:
        return
    usable = " or ".join(repr(item) for item in foreign.harmless)
    accepted = f" Only {usable} is accepted." if usable else ""
    raise ConfigError(
        f"{name}={shown(value)}{where} has no equivalent here: {foreign.reason}.{accepted}"
    )


# PyYAML lets errors of its constructors through for explicit tags with nonsense behind them.
_YAML_ERRORS = (
    yaml.YAMLError,
    RecursionError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The options of a YAML file; dashes in keys become underscores. Raises ConfigError."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
        loaded = yaml.load(text, _StrictLoader)  # a SafeLoader
    except OSError as error:
        raise ConfigError(f"Can't read the configuration file {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"The configuration file {path} is not UTF-8: {error.reason}.") from None
    except yaml.MarkedYAMLError as error:  # whose text quotes the line, passwords and all
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ConfigError(
            f"The configuration file {path} is not valid YAML: {error.problem}{where}"
        ) from None
    except _YAML_ERRORS as error:
        raise ConfigError(f"The configuration file {path} is not valid YAML: {error}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"The configuration file {path} must be a mapping of options to values, "
            f"got a {type(loaded).__name__}."
        )
    options: dict[str, Any] = {}
    for key, value in loaded.items():
        name = str(key).removeprefix("--").replace("-", "_")
        if name in options:
            raise ConfigError(f"{name} is given twice in {path}: keep one.")
        options[name] = value
    return options


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that refuses a key written twice, where YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int | float | bool):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {shown(key)} is given twice", key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)
