"""Sampling flags: one for each field, only what was given, text turned into the right type."""

import argparse

import pytest

from moestro.config import add_engine_flags, engine_config_from_args
from moestro.core.sampling_flags import add_sampling_flags, sampling_overrides_from_args
from moestro.core.sampling_params import SamplingParams, sampling_field_names
from moestro.errors import ConfigError


def overrides(*argv: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser)
    return sampling_overrides_from_args(parser.parse_args(argv))


def test_nothing_given() -> None:
    assert overrides() == {}


def test_every_field_has_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser)
    text = parser.format_help()
    for name in sampling_field_names():
        if name != "grammar":
            assert "--" + name.replace("_", "-") in text


def test_values_arrive_typed() -> None:
    found = overrides(
        "--temperature", "0.5", "--top-k", "-1", "--max-tokens", "32", "--ignore-eos",
        "--no-skip-special-tokens", "--stop", "END", "--stop", "x y", "--stop-token-ids", "1,2",
        "--stop-token-ids", "3", "--logit-bias", '{"5": -1.5}', "--seed", "-7", "--n", "2",
    )  # fmt: skip
    assert found == {
        "temperature": 0.5,
        "top_k": -1,
        "max_tokens": 32,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stop": ["END", "x y"],
        "stop_token_ids": [1, 2, 3],
        "logit_bias": {5: -1.5},
        "seed": -7,
        "n": 2,
    }
    params = SamplingParams(**found)  # type: ignore[arg-type]
    assert params.logit_bias == ((5, -1.5),)


def test_max_tokens_none() -> None:
    assert overrides("--max-tokens", "none") == {"max_tokens": None}


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--temperature", "hot"),
        ("--top-k", "1.5"),
        ("--max-tokens", ""),
        ("--stop-token-ids", "1,x"),
        ("--logit-bias", "[1]"),
        ("--logit-bias", "{"),
        ("--logit-bias", '{"a": 1}'),
        ("--seed", "now"),
    ],
)
def test_bad_text_names_the_flag(flag: str, text: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        overrides(flag, text)


def test_seed_is_one_flag_for_engine_and_requests() -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    add_sampling_flags(parser)
    args = parser.parse_args(["--seed", "5"])
    assert engine_config_from_args(args).seed == 5
    assert sampling_overrides_from_args(args) == {"seed": 5}
