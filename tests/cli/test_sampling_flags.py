"""Sampling flags: one for each field, only what was given, text turned into the right type."""

import argparse

import pytest

from moestro.cli.sampling_flags import (
    add_sampling_flags,
    refuse_without_effect,
    sampling_overrides_from_args,
)
from moestro.config import add_engine_flags, engine_config_from_args
from moestro.core.sampling_params import SamplingParams, sampling_field_names
from moestro.errors import ConfigError, RequestError


def overrides(*argv: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser, {})
    return sampling_overrides_from_args(parser.parse_args(argv))


def test_nothing_given() -> None:
    assert overrides() == {}


def test_every_field_has_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser, {})
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
        ("--logit-bias", "[" * 100_000),
        ("--logit-bias", '{"1": 1' + "0" * 400 + "}"),
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
    add_sampling_flags(parser, {})
    args = parser.parse_args(["--seed", "5"])
    assert engine_config_from_args(args).seed == 5
    assert sampling_overrides_from_args(args) == {"seed": 5}


def test_help_tells_the_default_that_holds() -> None:
    parser = argparse.ArgumentParser(
        formatter_class=lambda prog: argparse.HelpFormatter(prog, width=200)
    )
    add_sampling_flags(parser, {"max_tokens": "256"})
    text = parser.format_help()
    assert "up to the context limit (default: 256)" in text
    assert "0 is greedy; higher is more random (default: the checkpoint's, else 1)" in text
    assert "sequences to generate for each prompt (default: 1)" in text
    assert "turn token ids into text (default: on)" in text


def test_flags_that_a_command_can_not_honour_are_refused() -> None:
    reasons = {"n": "one answer is shown", "logprobs": "text only"}
    refuse_without_effect({"n": 1, "top_k": 3}, SamplingParams(), reasons)
    with pytest.raises(ConfigError, match="--n has no effect here: one answer is shown"):
        refuse_without_effect({"n": 2}, SamplingParams(), reasons)
    with pytest.raises(ConfigError, match="--logprobs"):
        refuse_without_effect({"logprobs": 0}, SamplingParams(), reasons)


@pytest.mark.parametrize(
    "argv",
    [
        ("--max-tokens", "0"),
        ("--top-p", "2"),
        ("--min-tokens", "9", "--max-tokens", "8"),
    ],
)
def test_values_out_of_range_are_refused_at_once(argv: tuple[str, ...]) -> None:
    with pytest.raises(RequestError):
        overrides(*argv)


def test_min_tokens_alone_waits_for_the_checkpoints_max_tokens() -> None:
    assert overrides("--min-tokens", "300") == {"min_tokens": 300}
