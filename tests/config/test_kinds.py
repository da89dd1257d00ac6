"""What each kind of option accepts, and what it does not."""

import argparse
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.config.kinds import (
    Choice,
    Integer,
    Kind,
    Object,
    Seconds,
    Share,
    Size,
    Switch,
    Text,
    Words,
)

COUNT = Integer(1, 10**6)
AUTO = Integer(1, 10**6, auto=True)
PAGE = Integer(1, 4096, power_of_two=True)
GOOD: list[tuple[Kind, Any, object]] = [
    (COUNT, 5, 5),
    (COUNT, "5", 5),
    (COUNT, 5.0, 5),
    (COUNT, "32k", 32_000),
    (COUNT, "32K", 32 * 1024),
    (COUNT, " 25.6k ", 25_600),
    (COUNT, "1e3", 1000),
    (AUTO, "auto", None),
    (AUTO, -1, None),
    (PAGE, "64", 64),
    (Size(), 0, 0),
    (Size(), "4GiB", 2**32),
    (Size(), "4 gib", 2**32),
    (Size(), "500MB", 500_000_000),
    (Size(), "1.5 GB", 1_500_000_000),
    (Size(), "4G", 2**32),
    (Size(), "4g", 4_000_000_000),
    (Size(), 4e9, 4_000_000_000),
    (Share(), "0.9", 0.9),
    (Share(), 1, 1.0),
    (Seconds(), "0", 0.0),
    (Switch(), "True", True),
    (Switch(), False, False),
    (Choice(("a", "b"), {"c": "a"}), "c", "a"),
    (Choice(("float32",)), "torch.float32", "float32"),
    (Object(), '{"a": [1]}', {"a": [1]}),
    (Object(), {"a": 1}, {"a": 1}),
    (Text(), Path("/a/b"), "/a/b"),
    (Words(), "one", ("one",)),
    (Words(), ["one", "two"], ("one", "two")),
]
BAD: list[tuple[Kind, Any]] = [
    *((COUNT, v) for v in (0, -3, 10**6 + 1, 1.5, "1.5", True, None, [1], "5x", "", "0x10", "nan")),
    *((COUNT, v) for v in (math.nan, math.inf, "1e400", "5 MB", "-1", b"5", "\u0663k", "1_000")),
    *((AUTO, v) for v in (-2, 0, "Auto", False)),
    *((PAGE, v) for v in (48, 0, 8192)),
    *((Size(), v) for v in (-1, "-1GB", "4 GiBs", "GB", "1.0001 kB", math.nan, 2**63, True, "4XB")),
    (Size(1), 0),
    *((Share(), v) for v in (0, -0.1, 1.01, "nan", math.nan, True, None, "half")),
    *((Seconds(), v) for v in (-1, math.inf, "soon", True)),
    *((Switch(), v) for v in ("yes", 1, 0, None, "")),
    *((Choice(("a",)), v) for v in ("b", True, None, "")),
    *((Object(), v) for v in ("[1]", "{", "1", 5, {1: 2}, [("a", 1)], "[" * 10**5)),
    *((Text(), v) for v in ("", "  ", "a\0b", 5, None)),
    *((Words(), v) for v in ("", [""], [1], 5, {"a"})),
]


@pytest.mark.parametrize(("kind", "value", "wanted"), GOOD)
def test_accepted(kind: Kind, value: Any, wanted: object) -> None:
    found = kind.parse(value)
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(("kind", "value"), BAD)
def test_refused(kind: Kind, value: Any) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError, RecursionError)):
        kind.parse(value)


@given(st.integers(1, 10**6))
def test_counts_as_text_are_exact(number: int) -> None:
    assert COUNT.parse(str(number)) == number


@given(st.integers(0, 2**62))
def test_sizes_are_exact_beyond_floats(number: int) -> None:
    assert Size().parse(f"{number}B") == number


def test_every_kind_says_what_it_expects() -> None:
    for kind in {type(kind): kind for kind, _, _ in GOOD}.values():
        assert kind.expects
        argparse.ArgumentParser().add_argument("--x", help=kind.expects)
