"""Every environment variable Moestro reads; this is the only module that reads any.

Values are read when asked for, never at import, so a test or a parent process may change them.
An empty value counts as unset.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from moestro.errors import ConfigError, shown

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EnvVar(Generic[T]):
    """One variable: how its text becomes a value, and what holds when it is unset.

    values: what may be written, for messages and the docs.
    """

    name: str
    values: str
    default: T
    doc: str
    parse: Callable[[str], T]

    @property
    def is_set(self) -> bool:
        """Whether the environment chooses a value; an empty one does not."""
        return bool(self._text())

    def get(self) -> T:
        """The value now. Raises ConfigError naming the variable, its value and the choices."""
        text = self._text()
        if not text and self.default is None:
            return self.default
        text = text or str(self.default)  # through parse as well, so that ~ is expanded
        try:
            return self.parse(text)
        except ValueError:
            raise ConfigError(
                f"Environment variable {self.name}={shown(text)} is not valid: expected "
                f"{self.values}. Correct or unset it (default: {self.default})."
            ) from None

    def _text(self) -> str:
        return os.environ.get(self.name, "").strip()


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in names:
            raise ValueError(text)
        return text.lower()

    return parse


def _path(text: str) -> Path:
    if "\0" in text:
        raise ValueError(text)
    try:
        return Path(text).expanduser()
    except RuntimeError:  # no home folder
        raise ValueError(text) from None


def _optional_path(text: str) -> Path | None:
    return _path(text)


PREFIX = "MOESTRO_"
CPU_ISA_LEVELS = ("auto", "portable", "avx2", "avx512", "amx", "reference")
LOG_LEVELS = ("debug", "info", "warning", "error")

CPU_ISA = EnvVar(
    "MOESTRO_CPU_ISA",
    " | ".join(CPU_ISA_LEVELS),
    "auto",
    "Kernel level on CPU. auto takes the highest the machine has; reference uses no kernel "
    "library. A level the machine lacks is an error.",
    _choice(*CPU_ISA_LEVELS, "amx-emulated"),  # only builds for tests have that one
)
LOG_LEVEL = EnvVar(
    "MOESTRO_LOG_LEVEL",
    " | ".join(LOG_LEVELS),
    "info",
    "Least severe log lines shown; --log-level wins.",
    _choice(*LOG_LEVELS),
)
CACHE_DIR = EnvVar(
    "MOESTRO_CACHE_DIR",
    "a folder",
    Path("~/.cache/moestro"),
    "Root of everything cached on disk; the cache_dir option wins.",
    _path,
)
PEERS_PYTHON: EnvVar[Path | None] = EnvVar(
    "MOESTRO_PEERS_PYTHON",
    "a Python executable",
    None,
    "Python of a virtual environment with transformers >= 5.24, for the tests marked peers.",
    _optional_path,
)

ALL: tuple[EnvVar[str] | EnvVar[Path] | EnvVar[Path | None], ...] = (
    CPU_ISA,
    LOG_LEVEL,
    CACHE_DIR,
    PEERS_PYTHON,
)


def unknown_names() -> tuple[str, ...]:
    """Variables that are set, look like these and are none: misspelt, most likely."""
    known = {variable.name for variable in ALL}
    return tuple(sorted(n for n in os.environ if n.startswith(PREFIX) and n not in known))
