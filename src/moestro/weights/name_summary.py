"""Many tensor names in few lines: numbers that vary are written as sets."""

import re
from collections.abc import Iterable, Iterator

# Whole words only, and only what int() gives back as it was.
_NUMBER = re.compile(r"(?<![A-Za-z0-9_])(?:0|[1-9][0-9]{0,17})(?![A-Za-z0-9_])")
_Key = tuple[int, ...]


def summarize_names(names: Iterable[str], max_lines: int = 20) -> list[str]:
    """Lines such as `model.layers.{1..4}.mlp.experts.{0..15}.up_proj.weight (64)`.

    Each line stands for exactly the names it spells; beyond max_lines a last line counts the rest.
    """
    by_pattern: dict[str, set[_Key]] = {}
    for name in names:
        key = tuple(int(n) for n in _NUMBER.findall(name))
        by_pattern.setdefault(
            _NUMBER.sub("{}", name.replace("{", "{{").replace("}", "}}")), set()
        ).add(key)
    lines: list[tuple[str, int]] = []
    for pattern, keys in by_pattern.items():
        for sets in _products(keys):
            count = 1
            for values in sets:
                count *= len(values)
            lines.append((pattern.format(*(_set_text(values) for values in sets)), count))
    shown = [text + (f" ({count})" if count > 1 else "") for text, count in lines[:max_lines]]
    rest = sum(count for _, count in lines[max_lines:])
    return shown + ([f"... and {rest} more"] if rest else [])


def _products(keys: set[_Key]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Cover keys by disjoint products of number sets."""
    if keys == {()}:
        yield ()
        return
    by_first: dict[int, set[_Key]] = {}
    for key in keys:
        by_first.setdefault(key[0], set()).add(key[1:])
    by_rest: dict[frozenset[_Key], list[int]] = {}
    for first in sorted(by_first):
        by_rest.setdefault(frozenset(by_first[first]), []).append(first)
    for rest, firsts in by_rest.items():
        for product in _products(set(rest)):
            yield (tuple(firsts), *product)


def _set_text(values: tuple[int, ...]) -> str:
    if len(values) == 1:
        return str(values[0])
    runs: list[list[int]] = []
    for v in sorted(values):
        if runs and v == runs[-1][-1] + 1:
            runs[-1].append(v)
        else:
            runs.append([v])
    texts = [f"{r[0]}..{r[-1]}" if len(r) > 2 else ",".join(map(str, r)) for r in runs]
    return "{" + ",".join(texts) + "}"
