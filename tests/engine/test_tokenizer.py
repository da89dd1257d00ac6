"""The tokenizer of the bundled model, and what broken or unusual tokenizer files do."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.core.sampling_params import SamplingParams
from moestro.engine.detokenizer import Detokenizer
from moestro.engine.tokenizer import LONG_TEXT_CHARS, Tokenizer
from moestro.errors import CheckpointError, RequestError, UnsupportedError
from moestro.weights.source import resolve_model

TINY = resolve_model("tiny-hy3")
TOKENIZER = Tokenizer.load(TINY)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path / name)
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_special_tokens_of_the_bundled_model() -> None:
    assert (TOKENIZER.bos_token, TOKENIZER.bos_token_id) == ("<|bos|>", 1)
    assert (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id) == (2, 0)
    assert TOKENIZER.all_special_ids == [0, 1, 2]
    assert len(TOKENIZER) == TOKENIZER.vocab_size == len(TOKENIZER.get_vocab()) == 4096
    assert TOKENIZER.token_suffix == ""


@given(st.text(max_size=60))
def test_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids[0] == TOKENIZER.bos_token_id
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.encode(text, add_special_tokens=False) == ids[1:]


@given(st.lists(st.integers(0, 4095), max_size=60), st.booleans())
def test_decoding_is_that_of_the_library_whole_or_in_pieces(ids: list[int], skip: bool) -> None:
    expected = TOKENIZER._backend.decode(ids, skip_special_tokens=skip)
    assert TOKENIZER.decode(ids, skip_special_tokens=skip) == expected
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(skip_special_tokens=skip))
    pieces = [detokenizer.feed([i]).text for i in ids]
    assert "".join(pieces) + detokenizer.feed([], last=True).text == expected


def test_the_length_bound_holds() -> None:
    assert TOKENIZER.max_chars_per_token is not None
    for piece, token_id in TOKENIZER.get_vocab().items():
        assert len(TOKENIZER.decode([token_id], False)) <= TOKENIZER.max_chars_per_token, piece


@pytest.mark.parametrize("text", ["a\ud800b", "a\udfff", "\udc80"])
def test_lone_surrogates_are_refused_by_position(text: str) -> None:
    with pytest.raises(RequestError, match=f"at position {len(text.rstrip('b')) - 1}"):
        TOKENIZER.encode(text)


def test_nul_bytes_are_text() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("a\0b\0")) == "a\0b\0"


def test_unknown_ids_have_no_text() -> None:
    assert TOKENIZER.decode([10**6, 100, -1]) == TOKENIZER.decode([100])


def test_missing_files_name_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="skip_tokenizer_init"):
        Tokenizer.load(tmp_path)


def test_broken_files(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a readable tokenizer"):
        Tokenizer.load(folder)


def test_other_models_than_bpe_are_refused(folder: Path) -> None:
    edit(
        folder / "tokenizer.json", model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    )
    with pytest.raises(UnsupportedError, match="the model is WordLevel"):
        Tokenizer.load(folder)


def test_an_absurd_token_id_is_refused_at_once(folder: Path) -> None:
    """The library walks through all ids up to the highest one: minutes, and gigabytes of holes."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    model["vocab"]["far"] = 2**31
    edit(folder / "tokenizer.json", model=model)
    with pytest.raises(CheckpointError, match="token id 2147483648 is beyond"):
        Tokenizer.load(folder)


def test_lost_bytes_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    edit(folder / "tokenizer.json", model=model, added_tokens=[], post_processor=None)
    edit(folder / "tokenizer_config.json", eos_token=None, bos_token=None, pad_token=None)
    assert Tokenizer.load(folder).encode("abc") == [0, 1]
    assert "lacks 254 of the 256 byte letters" in caplog.text


def test_what_the_library_refuses_is_a_request_error(folder: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "nowhere"}
    edit(folder / "tokenizer.json", model=model, added_tokens=[], post_processor=None)
    edit(folder / "tokenizer_config.json", eos_token=None, bos_token=None, pad_token=None)
    with pytest.raises(RequestError, match="can't encode the prompt"):
        Tokenizer.load(folder).encode("xyz")


def test_an_eos_of_several_ids_is_refused(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token="<|the end|>")
    with pytest.raises(CheckpointError, match=r"'<\|the end\|>' is not one token but \d+"):
        Tokenizer.load(folder)


def test_tokens_may_be_objects_and_special_tokens_map_counts(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token={"content": "<|eos|>"}, pad_token=None)
    (folder / "special_tokens_map.json").write_text('{"pad_token": "<|pad|>"}')
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)


def test_added_tokens_that_are_not_special_survive(folder: Path) -> None:
    """Think markers, with Hy3's suffix and bars beyond ASCII."""
    marks = ["<think:open>", "<\uff5chy_eos:open\uff5c>"]
    entries = {str(4096 + n): {"content": mark, "special": n == 1} for n, mark in enumerate(marks)}
    edit(folder / "tokenizer_config.json", added_tokens_decoder=entries, token_suffix=":open")
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("".join(marks) + "x", add_special_tokens=False)
    assert ids[:2] == [4096, 4097]
    assert tokenizer.decode(ids) == marks[0] + "x"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "".join(marks) + "x"
    assert tokenizer.token_suffix == ":open"
    assert tokenizer.added_tokens[marks[0]] == 4096


def test_added_tokens_under_another_id_are_refused(folder: Path) -> None:
    entries = {"7": {"content": "<|eos|>", "special": True}}
    edit(folder / "tokenizer_config.json", added_tokens_decoder=entries)
    with pytest.raises(CheckpointError, match="do not belong together"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (False, False)])
def test_bos_and_eos_flags_are_obeyed(folder: Path, bos: bool, eos: bool) -> None:
    edit(folder / "tokenizer_config.json", add_bos_token=bos, add_eos_token=eos)
    ids = Tokenizer.load(folder).encode("x")
    assert (ids[0] == 1, ids[-1] == 2, len(ids)) == (bos, eos, 1 + bos + eos)


def test_truncation_in_the_file_is_ignored(folder: Path) -> None:
    truncation = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    edit(folder / "tokenizer.json", truncation=truncation)
    assert len(Tokenizer.load(folder).encode("a b c d e f g h")) > 3


def test_only_byte_level_decoders(folder: Path) -> None:
    edit(folder / "tokenizer.json", decoder={"type": "Fuse"})
    with pytest.raises(UnsupportedError, match="decoder is Fuse"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("normalizer", "factor"), [(None, 1), ({"type": "NFC"}, 4), ({"type": "Lowercase"}, None)]
)
def test_the_length_bound_knows_normalisers(
    folder: Path, normalizer: dict[str, str] | None, factor: int | None
) -> None:
    edit(folder / "tokenizer.json", normalizer=normalizer)
    base = TOKENIZER.max_chars_per_token
    assert base is not None
    wanted = None if factor is None else base * factor
    assert Tokenizer.load(folder).max_chars_per_token == wanted


def test_apply_chat_template_needs_one() -> None:
    with pytest.raises(RequestError, match="chat template"):
        TOKENIZER.apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("text", ["ab \u20ac" * LONG_TEXT_CHARS, "x" * (LONG_TEXT_CHARS + 1)])
def test_long_texts_are_encoded_alike(text: str) -> None:
    for special in (True, False):
        expected = TOKENIZER._backend.encode(text, add_special_tokens=special).ids
        assert TOKENIZER.encode(text, special) == expected


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """An event loop stood still for a second at 300 kB when Python's lock was held."""
    turns, done = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.wait(0.001):
            turns += 1

    other = threading.Thread(target=count, daemon=True)
    other.start()
    try:
        before = turns
        TOKENIZER.encode("ab " * 300_000)
        during = turns - before
    finally:
        done.set()
        other.join()
    assert during >= 3
