"""One option: its kind, help and other names, and whether this version has what it asks for."""

import difflib
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from moestro.config.kinds import Kind
from moestro.errors import ConfigError, shown


@dataclass(frozen=True, slots=True)
class Knob:
    """What is known of one option besides its name, type and default.

    flags: short flags beside --its-name. also: other names with the same meaning. waits_for: the
    feature that a value outside `ready` needs and that this version lacks; such a value is
    refused. optional: None is a value (what it means is in the help).
    """

    kind: Kind
    help: str
    group: str
    flags: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    waits_for: str | None = None
    ready: tuple[object, ...] = ()
    optional: bool = False


def knob(default: object, kind: Kind, doc: str, *, group: str, **more: Any) -> Any:
    """A dataclass field that carries a Knob. `more`: flags, also, waits_for, ready;
    secret: may hold a password, so no repr shows it."""
    ready = more.pop("ready", (default,))
    in_repr = not more.pop("secret", False)
    made = Knob(kind, doc, group, ready=ready, optional=default is None, **more)
    return field(default=default, metadata={"knob": made}, repr=in_repr)


def knobs_of(owner: type) -> dict[str, tuple[Field[Any], Knob]]:
    """The options of a configuration class by name, in order."""
    return {f.name: (f, f.metadata["knob"]) for f in fields(owner)}


def checked(name: str, entry: tuple[Field[Any], Knob], value: object) -> object:
    """`value` as the option's typed value. Raises ConfigError naming value and limit.

    None stands for the default, as vLLM's callers expect.
    """
    described, option = entry
    default = described.default
    assert default is not MISSING
    if value is None:
        return default
    try:
        parsed = option.kind.parse(value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise ConfigError(f"{name} must be {option.kind.expects}, got {shown(value)}.") from None
    if option.waits_for is not None and parsed not in option.ready:
        usable = " or ".join(repr(r) for r in option.ready)
        raise ConfigError(
            f"{name}={shown(parsed)} is not available in this version: it comes with "
            f"{option.waits_for}. Use {usable} until then."
        )
    return parsed


def check_fields(config: Any) -> None:
    """Replace every field of a frozen configuration by its typed value, or raise ConfigError."""
    for name, entry in knobs_of(type(config)).items():
        object.__setattr__(config, name, checked(name, entry, getattr(config, name)))


def unknown_option(name: str, known: Iterable[str], where: str = "") -> ConfigError:
    """The error for a name that is no option, with the closest ones that are."""
    close = difflib.get_close_matches(name.lower().replace("-", "_"), sorted(known), n=3)
    hint = f" Did you mean {' or '.join(close)}?" if close else " docs/config.md lists them all."
    return ConfigError(f"{shown(name)} is not an option{where}.{hint}")
