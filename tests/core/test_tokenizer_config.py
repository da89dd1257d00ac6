"""The shapes that tokenizer_config.json and special_tokens_map.json may have."""

import json
from pathlib import Path
from typing import Any

import pytest

from moestro.core.tokenizer_config import (
    added_tokens,
    listed_tokens,
    read_tokenizer_config,
    token_text,
)
from moestro.errors import CheckpointError

EOS = {"content": "</s>", "special": True}


def write(folder: Path, content: object, name: str = "tokenizer_config.json") -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_no_file_is_an_empty_config(tmp_path: Path) -> None:
    assert read_tokenizer_config(tmp_path) == {}


def test_the_older_file_lies_below(tmp_path: Path) -> None:
    write(tmp_path, {"eos_token": "old", "pad_token": "<pad>"}, "special_tokens_map.json")
    write(tmp_path, {"eos_token": EOS, "bos_token": None})
    config = read_tokenizer_config(tmp_path)
    assert {k: token_text(v) for k, v in config.items()} == {
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "bos_token": None,
    }


def test_added_tokens_come_in_the_order_of_their_ids(tmp_path: Path) -> None:
    write(tmp_path, {"added_tokens_decoder": {"10": EOS, "9": EOS}})
    assert list(added_tokens(read_tokenizer_config(tmp_path))) == [9, 10]
    assert added_tokens({"added_tokens_decoder": None}) == {}


def test_further_tokens_under_either_name() -> None:
    assert listed_tokens({"additional_special_tokens": ["a", EOS]}) == ["a", EOS]
    assert listed_tokens({"extra_special_tokens": {"image": "b"}}) == ["b"]
    assert listed_tokens({}) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_token", 5),
        ("eos_token", ["</s>", "<end>"]),
        ("eos_token", {"content": 5}),
        ("eos_token", {}),
        ("bos_token", True),
        ("added_tokens_decoder", []),
        ("added_tokens_decoder", "abc"),
        ("added_tokens_decoder", {"x": EOS}),
        ("added_tokens_decoder", {"-1": EOS}),
        ("added_tokens_decoder", {"1.5": EOS}),
        ("added_tokens_decoder", {"9" * 5000: EOS}),
        ("added_tokens_decoder", {"5": 5}),
        ("added_tokens_decoder", {"5": "text"}),
        ("additional_special_tokens", 5),
        ("additional_special_tokens", [5]),
        ("extra_special_tokens", "abc"),
        ("extra_special_tokens", {"image": 5}),
    ],
)
def test_wrong_shapes_are_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    write(tmp_path, {key: value})
    with pytest.raises(CheckpointError, match=key) as refused:
        read_tokenizer_config(tmp_path)
    assert "tokenizer_config.json" in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ('{"eos_token": "\\ud800"}', "surrogate"),
        ('{"\\udfff": 1}', "surrogate"),
    ],
)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_broken_files(tmp_path: Path, name: str, text: str, words: str) -> None:
    write(tmp_path, text, name)
    with pytest.raises(CheckpointError, match=words):
        read_tokenizer_config(tmp_path)


def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").mkdir()
    with pytest.raises(CheckpointError, match="no regular file"):
        read_tokenizer_config(tmp_path)
