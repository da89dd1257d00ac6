"""How messages show what somebody else wrote."""

from moestro.errors import MAX_SHOWN_CHARS, shown


def test_short_values_are_told_as_they_print() -> None:
    assert shown("a\n") == "'a\\n'"
    assert shown([1, None]) == "[1, None]"


def test_long_values_are_cut() -> None:
    assert shown("x" * 10_000) == "'" + "x" * (MAX_SHOWN_CHARS - 1) + "..."
    assert shown("x" * (MAX_SHOWN_CHARS - 2)) == repr("x" * (MAX_SHOWN_CHARS - 2))


def test_what_does_not_print_is_told_by_its_type() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(10**10_000) == "<int too large to show>"
    assert shown(deep) == "<list too large to show>"
