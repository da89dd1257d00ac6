"""Incremental text equals decoding everything at once, and stop strings cut it exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.byte_vocabulary import ByteVocabulary

from moestro.core.sampling_params import SamplingParams
from moestro.engine.detokenizer import Detokenizer

IDS = st.lists(st.integers(0, ByteVocabulary.SIZE + 3), max_size=40)
CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=8)


def groups(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """ids cut into runs whose lengths cycle through sizes."""
    cut, n = [], 0
    while ids:
        size = sizes[n % len(sizes)]
        cut.append(ids[:size])
        ids, n = ids[size:], n + 1
    return cut


@given(IDS, CUTS, st.booleans(), st.booleans())
def test_deltas_concatenate_to_the_decoded_text(
    ids: list[int], sizes: list[int], skip: bool, spaces: bool
) -> None:
    vocabulary = ByteVocabulary()
    params = SamplingParams(skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    detokenizer = Detokenizer(vocabulary, params)
    text = "".join(detokenizer.feed(g).text for g in groups(ids, sizes))
    text += detokenizer.feed([], last=True).text
    assert text == vocabulary.decode(ids, skip)


@given(st.text(min_size=1, max_size=20), CUTS)
def test_no_delta_holds_half_a_character(text: str, sizes: list[int]) -> None:
    detokenizer = Detokenizer(ByteVocabulary(), SamplingParams())
    pieces = [detokenizer.feed(g).text for g in groups(list(text.encode()), sizes)]
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in p for p in pieces)


def test_unfinished_character_becomes_one_replacement_at_the_end() -> None:
    detokenizer = Detokenizer(ByteVocabulary(), SamplingParams())
    assert detokenizer.feed(list("a\u20ac".encode()[:-1])).text == "a"
    assert detokenizer.feed([], last=True).text == "\ufffd"


STOPS = st.lists(st.text("ab\u00e9", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.text("ab\u00e9", max_size=30), STOPS, CUTS, st.booleans(), st.integers(0, 10))
def test_stop_strings_do_not_depend_on_how_tokens_arrive(
    text: str, stops: list[str], sizes: list[int], include: bool, min_tokens: int
) -> None:
    ids = list(text.encode())
    params = SamplingParams(
        stop=tuple(stops), include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=99
    )
    detokenizer, shown, used, stop = Detokenizer(ByteVocabulary(), params), "", 0, None
    for group in groups(ids, sizes):
        piece = detokenizer.feed(group)
        shown, used, stop = shown + piece.text, used + piece.num_tokens, piece.stop
        if stop is not None:
            break
    if stop is None:
        shown += detokenizer.feed([], last=True).text
    expected = _expected(ids, stops, min_tokens)
    if expected is None:
        assert (shown, stop) == (text, None)
        return
    wanted_stop, wanted_used = expected
    before = ids[:wanted_used]
    whole = bytes(before).decode()
    assert (stop, used) == (wanted_stop, wanted_used)
    assert shown == (whole if include else whole.removesuffix(wanted_stop))


def _expected(ids: list[int], stops: list[str], min_tokens: int) -> tuple[str, int] | None:
    for used in range(min_tokens + 1, len(ids) + 1):
        try:
            text = bytes(ids[:used]).decode()
        except UnicodeDecodeError:
            continue
        found = [s for s in stops if text.endswith(s)]
        if found:
            return max(found, key=len), used
    return None


def test_text_that_may_become_a_stop_string_waits() -> None:
    detokenizer = Detokenizer(ByteVocabulary(), SamplingParams(stop=("\n\nclass",)))
    assert detokenizer.feed(b"x = 1\n").text == "x = 1"
    assert detokenizer.feed(b"\ncla").text == ""
    assert detokenizer.feed(b"y").text == "\n\nclay"
    assert detokenizer.feed(b"\n\nclass").text == ""


def test_a_stop_inside_a_token_cuts_it_and_drops_the_tokens_behind() -> None:
    vocabulary = ByteVocabulary(words=("foo END bar",))
    detokenizer = Detokenizer(vocabulary, SamplingParams(stop=("END",)))
    piece = detokenizer.feed([vocabulary.word_id(0), ord("x")])
    assert (piece.text, piece.num_tokens, piece.stop) == ("foo ", 1, "END")


def test_held_text_comes_out_when_the_sequence_ends() -> None:
    detokenizer = Detokenizer(ByteVocabulary(), SamplingParams(stop=("abc",)))
    piece = detokenizer.feed(b"xab", last=True)
    assert (piece.text, piece.stop) == ("xab", None)


def test_a_replacement_made_at_the_end_can_be_the_stop_string() -> None:
    detokenizer = Detokenizer(ByteVocabulary(), SamplingParams(stop=("\ufffd",)))
    piece = detokenizer.feed(b"a\xe2", last=True)
    assert (piece.text, piece.stop) == ("a", "\ufffd")


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab<eos>")])
def test_text_of_the_stop_token_shows_only_on_request(include: bool, text: str) -> None:
    params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=False)
    detokenizer = Detokenizer(ByteVocabulary(), params)
    piece = detokenizer.feed([*b"ab", ByteVocabulary.EOS], last=True, ended_by_token=True)
    assert piece.text == text
