"""What values an option takes: parsing and the sentence that tells a user what is expected.

Every kind accepts a Python value, a YAML value or the text of a flag and returns the typed value;
ValueError or TypeError means "not one of these", and the caller names the option.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Kind(Protocol):
    """One way to read a value."""

    @property
    def expects(self) -> str:
        """Completes "must be ..."."""

    def parse(self, value: object) -> object:
        """The typed value; ValueError or TypeError when it is none."""


# vLLM's reading of counts: a lower-case letter is decimal, an upper-case one binary.
_COUNT_UNITS = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
_BYTE_UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_NUMBER = re.compile(r"([+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)", re.ASCII)


def _whole(value: object, unit: str = "") -> int:
    """An exact integer from an int, an integral float or text with a unit."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(value)
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return _integral(value)
    match = _NUMBER.fullmatch(value.strip())
    if match is None:
        raise ValueError(value)
    number, suffix = match[1], match[2]
    scale = _COUNT_UNITS.get(suffix)
    if scale is None and unit == "bytes":
        scale = _BYTE_UNITS.get(suffix.lower())
    if scale is None:
        raise ValueError(value)
    if number.lstrip("+-").isdigit():
        return int(number) * scale
    return _integral(float(number) * scale)


def _integral(value: float) -> int:
    if not math.isfinite(value) or value != int(value):
        raise ValueError(value)
    return int(value)


@dataclass(frozen=True, slots=True)
class Text:
    """Non-empty text without NUL; a path object becomes its text."""

    what: str = "text"

    @property
    def expects(self) -> str:
        return f"{self.what} (not empty)"

    def parse(self, value: object) -> str:
        if not isinstance(value, str | Path):
            raise TypeError(value)
        text = str(value)
        if not text.strip() or "\0" in text:
            raise ValueError(value)
        return text


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words. `also` maps other spellings to them."""

    words: tuple[str, ...]
    also: Mapping[str, str] | None = None

    @property
    def expects(self) -> str:
        return "one of " + ", ".join(self.words)

    def parse(self, value: object) -> str:
        # torch.float32 and the like print as torch.<name>
        word = str(value).removeprefix("torch.") if not isinstance(value, bool) else ""
        word = (self.also or {}).get(word, word)
        if word not in self.words:
            raise ValueError(value)
        return word


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number; text may end in k, m, g (decimal) or K, M, G (binary)."""

    low: int
    high: int
    power_of_two: bool = False
    auto: bool = False

    @property
    def expects(self) -> str:
        what = "a power of two" if self.power_of_two else "a whole number"
        auto = ', or "auto"' if self.auto else ""
        return f"{what} from {self.low:,} to {self.high:,}{auto}"

    def parse(self, value: object) -> int | None:
        if self.auto and (value == "auto" or value == -1):
            return None
        number = _whole(value)
        if not self.low <= number <= self.high:
            raise ValueError(value)
        if self.power_of_two and number & (number - 1):
            raise ValueError(value)
        return number


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes: 4GiB, 500MB, 1.5 GB, 4096."""

    low: int = 0  # 0 or 1

    @property
    def expects(self) -> str:
        least = "a size above 0 bytes" if self.low else "0 or a size in bytes"
        return f'{least}, such as 4GiB, "500 MB" or 4294967296'

    def parse(self, value: object) -> int:
        number = _whole(value, "bytes")
        if not self.low <= number < 2**63:
            raise ValueError(value)
        return number


@dataclass(frozen=True, slots=True)
class Share:
    """A number above 0 and at most 1, or one that may be 0 as well."""

    may_be_zero: bool = False

    @property
    def expects(self) -> str:
        return "a number from 0 to 1" if self.may_be_zero else "a number above 0 and at most 1"

    def parse(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise TypeError(value)
        number = float(value)
        if not 0 <= number <= 1 or not (number or self.may_be_zero):
            raise ValueError(value)
        return number


@dataclass(frozen=True, slots=True)
class Seconds:
    """A duration in seconds, not negative."""

    low: float = 0

    @property
    def expects(self) -> str:
        return f"a number of seconds from {self.low:g} to 86,400"

    def parse(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise TypeError(value)
        number = float(value)
        if not self.low <= number <= 86400:
            raise ValueError(value)
        return number


@dataclass(frozen=True, slots=True)
class Switch:
    """True or false; YAML 1.1's yes/no/on/off arrive as booleans already."""

    @property
    def expects(self) -> str:
        return "true or false"

    def parse(self, value: object) -> bool:
        if isinstance(value, bool):
            return value
        words = {"true": True, "false": False}
        if not isinstance(value, str) or value.lower() not in words:
            raise ValueError(value)
        return words[value.lower()]


@dataclass(frozen=True, slots=True)
class Object:
    """A mapping with text keys, or the JSON text of one."""

    @property
    def expects(self) -> str:
        return "a mapping, or as a flag a JSON object such as '{\"key\": 1}'"

    def parse(self, value: object) -> dict[str, Any]:
        loaded = json.loads(value) if isinstance(value, str) else value
        if not isinstance(loaded, Mapping) or not all(isinstance(k, str) for k in loaded):
            raise ValueError(value)
        return dict(loaded)


@dataclass(frozen=True, slots=True)
class Words:
    """One or several non-empty texts."""

    @property
    def expects(self) -> str:
        return "one name or a list of names (not empty)"

    def parse(self, value: object) -> tuple[str, ...]:
        items = (value,) if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise TypeError(value)
        return tuple(Text("a name").parse(item) for item in items)
