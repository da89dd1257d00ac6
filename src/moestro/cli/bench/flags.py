"""Checks that flags of several benchmarks share; each raises ConfigError before anything loads."""

import json
from collections.abc import Container, Iterable
from typing import Any

from moestro.errors import ConfigError

_MOST_THREADS = 1024


def check_num_threads(count: int, *, least: int = 1) -> None:
    """--num-threads. Raises ConfigError."""
    if not least <= count <= _MOST_THREADS:
        raise ConfigError(f"--num-threads must be {least} to {_MOST_THREADS}, got {count}.")


def names(flag: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """A comma-separated list of known names, in order. Raises ConfigError."""
    given = tuple(dict.fromkeys(n.strip() for n in text.split(",") if n.strip()))
    unknown = [n for n in given if n not in known]
    if unknown or not given:
        what = f"does not know {', '.join(unknown)}" if unknown else "names nothing"
        raise ConfigError(f"{flag} {what}: it takes {', '.join(known)}.")
    return given


def engine_fields(text: str, own: Container[str]) -> dict[str, Any]:
    """--engine: EngineConfig fields as a JSON object, none of `own`. Raises ConfigError.

    own: fields that the benchmark sets itself; another value would change what it compares.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--engine is no JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--engine must be a JSON object, got {text}.")
    taken = [name for name in value if name in own]
    if taken:
        raise ConfigError(
            f"--engine can't set {', '.join(taken)}: the benchmark sets that itself. Leave it out."
        )
    return value
