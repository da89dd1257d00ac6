"""Stop strings found in pieces are those found in the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from moestro.engine.stop_strings import StopMatcher

SHORT = st.text("ab", min_size=1, max_size=5)


def first_end(text: str, stops: list[str]) -> tuple[str, int] | None:
    """The specification: the smallest end of a match, the longest string that ends there."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            return max(found, key=len), end
    return None


@given(st.lists(SHORT, min_size=1, max_size=4), st.lists(st.text("abc", max_size=6), max_size=12))
def test_pieces_stop_where_the_whole_text_does(stops: list[str], pieces: list[str]) -> None:
    matcher, seen, result = StopMatcher(stops), 0, None
    for piece in pieces:
        found = matcher.feed(piece, armed=True)
        if found is not None:
            result = found[0], seen + found[1]
            break
        seen += len(piece)
        text = "".join(pieces)[:seen]
        held = max(n for s in stops for n in range(len(s)) if text.endswith(s[:n]))
        assert matcher.num_held == held
    assert result == first_end("".join(pieces), stops)


def test_unarmed_passes_over_complete_matches_but_lets_one_begin() -> None:
    matcher = StopMatcher(["aa"])
    assert matcher.feed("aaa", armed=False) is None
    assert matcher.feed("a", armed=True) == ("aa", 1)


def test_long_repetitive_stop_is_linear() -> None:
    stop = "a" * 20_000 + "b"
    matcher = StopMatcher([stop])
    assert matcher.feed("a" * 200_000, armed=True) is None
    assert matcher.feed("b", armed=True) == (stop, 1)
