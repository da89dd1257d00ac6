"""ConfigReader: typed, strict access to a checkpoint's JSON, remembering which keys were read."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from moestro.errors import CheckpointError, UnsupportedError, shown

MAX_SIZE = 2**31 - 1


class ConfigReader:
    """Reads one JSON object. A key whose value is null counts as absent.

    `where` names the object in messages. Every method raises CheckpointError with the key, its
    value and the constraint; a method without a default requires the key.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config = config
        self._read: set[str] = set()
        self.where = where

    def has(self, key: str) -> bool:
        """Whether the key has a value; counts as read."""
        self._read.add(key)
        return self._config.get(key) is not None

    def value(self, key: str) -> Any:
        """The raw value or None; counts as read."""
        self._read.add(key)
        return self._config.get(key)

    def integer(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_SIZE
    ) -> int:
        """A whole number in [low, high]."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "must be a whole number")
        if not low <= value <= high:
            raise self.wrong(key, f"must be between {low} and {high}")
        return value

    def number(
        self, key: str, default: float | None = None, *, low: float, low_open: bool = True
    ) -> float:
        """A finite number above `low` (or equal to it when not low_open)."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "must be a number")
        if not _is_finite(value) or value < low or (low_open and value == low):
            least = "above" if low_open else "at least"
            raise self.wrong(key, f"must be a finite number {least} {low:g}")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """true or false."""
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "must be a string")
        return value

    def mapping(self, key: str) -> dict[str, Any] | None:
        """A JSON object, or None when absent."""
        if not self.has(key):
            return None
        value = self.value(key)
        if not isinstance(value, dict):
            raise self.wrong(key, "must be an object")
        return value

    def alias(self, *keys: str) -> str:
        """The one of several names for the same quantity that is present.

        Present more than once, the values must agree; absent everywhere, the first is returned.
        """
        present = [key for key in keys if self.has(key)]
        for other in present[1:]:
            if self._config[other] != self._config[present[0]]:
                raise self.wrong(
                    other,
                    f"must agree with {present[0]}={shown(self._config[present[0]])}: "
                    "both name the same quantity",
                )
        return present[0] if present else keys[0]

    def require(self, key: str, wanted: object, why: str) -> None:
        """Accept the key only when absent or `wanted`; raises UnsupportedError by name."""
        value = self.value(key)
        # True == 1 in Python, but not in JSON
        if value is not None and (
            value != wanted or isinstance(value, bool) is not isinstance(wanted, bool)
        ):
            raise UnsupportedError(
                f"{self.where}: {key}={shown(value)} is not supported ({why}); only {wanted!r} is."
            )

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """A token id below vocab_size, or None when absent."""
        return self.integer(key, low=0, high=vocab_size - 1) if self.has(key) else None

    def token_ids(self, key: str, vocab_size: int | None = None) -> tuple[int, ...]:
        """One token id or a list of them, without repetition, in order; () when absent."""
        if not self.has(key):
            return ()
        value = self.value(key)
        ids = value if isinstance(value, list) else [value]
        high = MAX_SIZE if vocab_size is None else vocab_size
        for item in ids:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < high:
                raise self.wrong(key, f"must be a token id below {high} or a list of such ids")
        return tuple(dict.fromkeys(ids))

    def refuse_unknown(self, harmless: Iterable[str]) -> None:
        """Raise UnsupportedError naming every key that was neither read nor is harmless."""
        unknown = sorted(set(map(str, self._config)) - self._read - set(harmless))
        if unknown:
            raise UnsupportedError(
                f"{self.where} has keys that this version does not know and that may change "
                f"what the model computes: {', '.join(unknown)}. Remove them if they do not."
            )

    def wrong(self, key: str, constraint: str) -> CheckpointError:
        """The error for a key whose value breaks a constraint."""
        return CheckpointError(f"{self.where}: {key}={shown(self._config.get(key))} {constraint}.")

    def _present(self, key: str, default: Any) -> Any:
        value = self.value(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.where} lacks {shown(key)}, which the model needs.")
        return value


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of float
        return False
