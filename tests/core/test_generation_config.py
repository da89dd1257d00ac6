"""generation_config.json: only what it gives, eos as id or list, do_sample false, bad values."""

import json
from pathlib import Path
from typing import Any

import pytest

from moestro.core.generation_config import (
    GenerationDefaults,
    load_generation_defaults,
    parse_generation_config,
)
from moestro.core.sampling_params import SamplingParams
from moestro.errors import CheckpointError


def test_only_given_values_are_taken() -> None:
    qwen = {
        "bos_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "pad_token_id": 151643,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "transformers_version": "4.51.0",
    }
    found = parse_generation_config(qwen)
    assert found.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert found.eos_token_ids == (151645, 151643)
    assert parse_generation_config({}) == GenerationDefaults()


def test_one_eos_and_none() -> None:
    assert parse_generation_config({"eos_token_id": 2}).eos_token_ids == (2,)
    assert parse_generation_config({"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize("off", [-1, 0])
def test_top_k_off(off: int) -> None:
    assert parse_generation_config({"top_k": off}).sampling == {"top_k": 0}


def test_max_new_tokens_and_penalty() -> None:
    given = {"max_new_tokens": 2048, "repetition_penalty": 1.05, "min_p": 0.1, "max_length": 20}
    found = parse_generation_config(given).sampling
    assert found == {"max_tokens": 2048, "repetition_penalty": 1.05, "min_p": 0.1}
    SamplingParams(**found)


def test_do_sample_false_is_greedy() -> None:
    given = {"do_sample": False, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.1}
    found = parse_generation_config(given).sampling
    assert found == {"temperature": 0.0, "repetition_penalty": 1.1}
    assert SamplingParams(**found).temperature == 0.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_new_tokens": 0}, "max_tokens"),
        ({"do_sample": "yes"}, "do_sample"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": [2, 10**6]}, "eos_token_id"),
    ],
)
def test_bad_values(given: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        parse_generation_config(given, vocab_size=4096)
    assert "generation_config" in str(caught.value)


def test_files(tmp_path: Path) -> None:
    assert load_generation_defaults(tmp_path) == GenerationDefaults()
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.4}))
    assert load_generation_defaults(tmp_path).sampling == {"temperature": 0.4}
    path.write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_generation_defaults(tmp_path)
