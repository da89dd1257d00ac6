"""Conformance cases and comparison, used by the tests and by `moestro ops`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Case:
    """One call of an op. make(generator) returns the keyword arguments, freshly drawn."""

    name: str
    dtype: torch.dtype
    make: Callable[[torch.Generator], dict[str, Any]]
