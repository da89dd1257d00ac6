"""Prompt lookup against a search of the whole sequence, and the choice between it and MTP."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.speculative.drafter import ComputedStep, DraftedSequence
from moestro.speculative.hybrid import CopyRecord, HybridDrafter, is_credible
from moestro.speculative.injected import InjectedDrafter, KnownTexts
from moestro.speculative.ngram_index import Match, NgramIndex
from moestro.speculative.prompt_lookup import PromptLookup, copied


def searched(tokens: list[int], shortest: int, longest: int) -> Match | None:
    """The definition: the longest suffix first, then the latest place that something follows."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                return Match(end, size)
    return None


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    cuts=st.sets(st.integers(1, 60)),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
)
@settings(max_examples=200)
def test_a_match_is_the_latest_of_the_longest(
    tokens: list[int], cuts: set[int], shortest: int, more: int
) -> None:
    index = NgramIndex(shortest, shortest + more)
    for length in sorted({*(c for c in cuts if c < len(tokens)), len(tokens)}):
        known = np.array(tokens[:length], np.int64)
        assert index.find(known) == searched(tokens[:length], shortest, shortest + more)


def test_a_long_prompt_is_found_by_any_of_its_places() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1 << 31, 20_000)
    index = NgramIndex(2, 4)
    assert index.find(tokens) is None
    for end in (4, 999, 19_000):
        tokens = np.append(tokens, tokens[end - 4 : end])
        assert index.find(tokens) == Match(end, 4)


@pytest.mark.parametrize(
    ("end", "count", "expected"),
    [(1, 3, (2, 3, 4)), (3, 1, (4,)), (3, 5, (4, 5, 4, 5, 4)), (4, 3, (5, 5, 5))],
)
def test_a_copy_goes_on_with_itself(end: int, count: int, expected: tuple[int, ...]) -> None:
    assert copied(np.array([1, 2, 3, 4, 5]), Match(end, 1), count) == expected


def sequence(tokens: Sequence[int], num_wanted: int, seq_id: int = 0) -> DraftedSequence:
    return DraftedSequence(seq_id, np.array(tokens, np.int64), 0, np.zeros(1, np.int32), num_wanted)


def step_of(*sequences: DraftedSequence) -> ComputedStep:
    nothing = cast(Any, None)
    return ComputedStep(nothing, nothing, nothing, nothing, sequences)


def test_lookup_drafts_as_many_as_are_wanted_and_forgets() -> None:
    lookup = PromptLookup(2, 4)
    text = [5, 6, 7, 8, 9, 5, 6]
    wanting = [sequence(text, 0), sequence(text, 3, 1), sequence(text, 9, 2), sequence([1], 4, 3)]
    drafts = lookup.propose(step_of(*wanting))
    assert drafts == [(), (7, 8, 9), (7, 8, 9, 5, 6, 7, 8, 9, 5), ()]
    assert not lookup.reads_hidden_states
    lookup.release([1, 2, 3, 44])
    assert not lookup._indexes
    # a sequence of the same number and other tokens, once the first is gone
    assert lookup.propose(step_of(sequence([1, 2, 9, 1, 2], 1, 2))) == [(9,)]


@pytest.mark.parametrize(
    ("length", "share", "expected"),
    [
        (4, None, True),
        (3, None, False),
        (2, 0.5, True),
        (2, 0.49, False),
        (4, 0.25, True),
        (4, 0.24, False),
    ],
)
def test_what_is_credible(length: int, share: float | None, expected: bool) -> None:
    assert is_credible(length, 4, share) is expected


def test_copies_are_judged_up_to_their_first_wrong_token() -> None:
    record = CopyRecord(begin=2, copy=(5, 6, 7, 8))
    record.judge(np.array([1, 2, 5, 6, 9, 8]))
    assert record.share == pytest.approx((0.9**2 + 0.9) / (0.9**2 + 0.9 + 1))
    share = record.share
    record.judge(np.array([1, 2, 5, 6, 9, 8, 8]))  # once only
    assert record.share == share


class Other:
    """Drafts 70, 71, ... and keeps what it was asked."""

    reads_hidden_states = True

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.calls: list[str] = []

    def propose(self, step: ComputedStep) -> list[tuple[int, ...]]:
        self.asked.append([s.num_wanted for s in step.sequences])
        return [tuple(range(70, 70 + min(2, s.num_wanted))) for s in step.sequences]

    def release(self, seq_ids: Sequence[int]) -> None:
        self.calls.append(f"release {list(seq_ids)}")

    def warm_up(self, sizes: Sequence[int]) -> None:
        self.calls.append(f"warm up {list(sizes)}")

    def close(self) -> None:
        self.calls.append("close")


def test_the_hybrid_copies_where_that_is_credible_and_else_asks_the_other() -> None:
    other = Other()
    hybrid = HybridDrafter(PromptLookup(2, 4), other)
    assert hybrid.reads_hidden_states
    four, two = [1, 2, 3, 4, 9, 8, 1, 2, 3, 4], [1, 2, 9, 8, 1, 2]
    wanting = (sequence(four, 3, 0), sequence(two, 3, 1), sequence([1, 2], 3, 2))
    assert hybrid.propose(step_of(*wanting)) == [(9, 8, 1), (70, 71), (70, 71)]
    assert other.asked == [[0, 3, 3]]
    # the copies came true in sequence 1, though they were not used, and not in sequence 0
    four, two = [*four, 7, 1, 2, 3, 4], [*two, 9, 8, 1, 2, 5, 9, 8]
    wanting = (sequence(four, 3, 0), sequence(two, 2, 1), sequence([1, 2, 70], 0, 2))
    assert hybrid.propose(step_of(*wanting)) == [(70, 71), (1, 2), ()]
    assert other.asked[1] == [3, 0, 0]
    hybrid.release([0, 1])
    hybrid.warm_up([1, 2])
    hybrid.close()
    assert other.calls == ["release [0, 1]", "warm up [1, 2]", "close"]


def test_injected_drafts_are_right_as_often_as_asked_and_always_the_same() -> None:
    text = list(range(100, 3100))
    drafter = InjectedDrafter(KnownTexts([[1], text]), (0.9, 0.5), 5000)
    runs = []
    for _ in range(2):
        accepted = []
        for length in range(1, 2001):
            (drafts,) = drafter.propose(step_of(sequence(text[:length], 3, 7)))
            assert len(drafts) == 3
            right = text[length : length + 3]
            accepted.append(next((i for i in range(3) if drafts[i] != right[i]), 3))
        runs.append(accepted)
    assert runs[0] == runs[1]
    reached = [sum(n >= depth for n in runs[0]) for depth in range(4)]
    assert reached[1] / reached[0] == pytest.approx(0.9, abs=0.03)
    assert reached[2] / reached[1] == pytest.approx(0.5, abs=0.04)
    assert reached[3] / reached[2] == pytest.approx(0.5, abs=0.05)


def test_injected_drafts_are_as_many_as_the_inner_drafter_has() -> None:
    other = Other()
    drafter = InjectedDrafter(KnownTexts([range(9)]), (1.0,), 99, other)
    assert drafter.reads_hidden_states
    drafts = drafter.propose(step_of(sequence([0, 1], 3), sequence([5], 3, 1)))
    assert drafts == [(2, 3), ()]  # nobody knows a text that begins with 5
    assert other.asked == [[3, 3]]
