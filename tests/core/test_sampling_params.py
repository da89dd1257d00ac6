"""What SamplingParams takes, and what it refuses by name."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.core.sampling_params import (
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_STOP_STRINGS,
    SamplingParams,
    sampling_field_names,
)
from moestro.errors import RequestError


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.max_tokens, params.min_tokens, params.repetition_penalty) == (16, 0, 1.0)
    assert not params.has_penalties


def test_shapes_users_write_are_taken() -> None:
    params = SamplingParams(
        stop="\n", stop_token_ids=[1, 2], logit_bias={"7": 1, 8: -2.5}, top_k=-1
    )
    assert params.stop == ("\n",)
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == ((7, 1.0), (8, -2.5))
    assert params.top_k == 0
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None).stop == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", MAX_SAMPLES + 1),
        ("n", True),
        ("n", 1.5),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", "many"),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("prompt_logprobs", MAX_LOGPROBS + 1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", 3),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [True]),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", 5),
        ("logit_bias", {1.5: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", [(1, 2.0), (1, 3.0)]),
        ("logit_bias", {"1": 2.0, 1: 3.0}),
        ("logit_bias", {1: 10**400}),
        ("stop", ["x"] * (MAX_STOP_STRINGS + 1)),
        ("stop", ["x" * 1000] * 66),
        ("temperature", 10**400),
        ("n", [10**5000]),
        ("ignore_eos", "yes"),
        ("detokenize", None),
        ("grammar", "json"),
    ],
)
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_messages_are_vllms() -> None:
    with pytest.raises(RequestError, match=r"temperature must be in \[0, 2\], got 3\.0\."):
        SamplingParams(temperature=3.0)
    with pytest.raises(RequestError, match=r"top_p must be in \(0, 1\], got 0\.0\."):
        SamplingParams(top_p=0.0)
    with pytest.raises(RequestError, match=r"max_tokens must be at least 1, got 0\."):
        SamplingParams(max_tokens=0)


def test_copies_are_checked_again() -> None:
    params = SamplingParams(temperature=0.5)
    assert params.with_(temperature=0.0).temperature == 0.0
    assert params.temperature == 0.5
    with pytest.raises(RequestError):
        params.with_(temperature=9.0)


_ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.floats(), max_size=2),
)


@given(name=st.sampled_from(sampling_field_names()), value=_ANYTHING)
def test_any_value_is_taken_or_refused_by_name(name: str, value: Any) -> None:
    """No other exception gets out, whatever type a client sends."""
    refused: RequestError | None = None
    try:
        SamplingParams(**{name: value})
    except RequestError as error:
        refused = error
    assert refused is None or refused.param is not None
