"""Finding stop strings in text that arrives in pieces, in one pass over its characters."""

from collections.abc import Sequence


class StopMatcher:
    """Looks for several strings at once (Knuth-Morris-Pratt, one state a string).

    The string that is complete first wins; of several that end at the same character, the
    longest. So what stops a text depends on its characters alone, not on how tokens cut it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._borders = [_border_table(s) for s in self._stops]
        self._matched = [0] * len(self._stops)

    @property
    def num_held(self) -> int:
        """How many of the characters seen last may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str, *, armed: bool) -> tuple[str, int] | None:
        """Take the next characters; the stop string found and how many of `text` it took.

        Not armed, complete matches are passed over (min_tokens), but a match may begin in them.
        """
        for at, char in enumerate(text):
            found = self._advance(char)
            if found is not None and armed:
                return found, at + 1
        return None

    def _advance(self, char: str) -> str | None:
        found: str | None = None
        for i, stop in enumerate(self._stops):
            borders, state = self._borders[i], self._matched[i]
            while state and stop[state] != char:
                state = borders[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                if found is None or len(stop) > len(found):
                    found = stop
                state = borders[-1]
            self._matched[i] = state
        return found


def _border_table(text: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = table[length - 1]
        if text[i] == text[length]:
            length += 1
        table[i] = length
    return table
