"""Long name lists become few lines that spell exactly the same names."""

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from moestro.weights.name_summary import summarize_names


def test_full_product_is_one_line() -> None:
    names = [
        f"model.layers.{i}.mlp.experts.{e}.up_proj.weight" for i in range(1, 5) for e in range(16)
    ]
    assert summarize_names(names) == ["model.layers.{1..4}.mlp.experts.{0..15}.up_proj.weight (64)"]


def test_single_name_stays_as_it_is() -> None:
    assert summarize_names(["lm_head.weight"]) == ["lm_head.weight"]
    assert summarize_names(["model.layers.3.odd{brace}.w"]) == ["model.layers.3.odd{brace}.w"]


def test_holes_and_pairs_are_exact() -> None:
    names = [f"a.{i}.w" for i in (0, 1, 2, 5, 7, 8)]
    assert summarize_names(names) == ["a.{0..2,5,7,8}.w (6)"]


def test_long_lists_are_cut_with_a_count() -> None:
    names = [f"weird{chr(97 + i)}.w" for i in range(26)]
    lines = summarize_names(names, max_lines=3)
    assert lines[-1] == "... and 23 more"
    assert len(lines) == 4


def spelled(line: str) -> list[str]:
    """The names a line stands for."""
    text = re.sub(r" \([0-9]+\)$", "", line)
    pieces = re.split(r"\{([0-9.,]+)\}", text)
    choices = []
    for i, piece in enumerate(pieces):
        if i % 2 == 0:
            choices.append([piece])
            continue
        values: list[str] = []
        for run in piece.split(","):
            low, _, high = run.partition("..")
            values += [str(v) for v in range(int(low), int(high or low) + 1)]
        choices.append(values)
    return ["".join(c) for c in itertools.product(*choices)]


@given(st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1))
def test_lines_spell_the_names(keys: set[tuple[int, int]]) -> None:
    names = [f"layers.{i}.experts.{e}.w" for i, e in keys]
    lines = summarize_names(names, max_lines=1000)
    assert sorted(n for line in lines for n in spelled(line)) == sorted(names)
