"""Rotary parameters in both forms, YaRN's defaults, contradictions."""

import math
from typing import Any

import pytest

from moestro.core.config_reader import ConfigReader
from moestro.core.model_spec import RopeSpec
from moestro.core.rope_config import read_rope
from moestro.errors import CheckpointError, UnsupportedError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def read(length: int = 40960, **keys: Any) -> RopeSpec:
    return read_rope(ConfigReader(keys, "config.json"), length)


def test_the_two_forms_agree() -> None:
    plain = RopeSpec(theta=1e6)
    assert read(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}) == plain
    assert read(rope_parameters={"rope_theta": 1e6}) == plain
    assert read(rope_theta=1000000) == plain
    assert read(rope_theta=1e6, rope_scaling=None) == plain
    assert read(rope_theta=1e6, rope_parameters={"rope_type": "default"}) == plain
    assert read(rope_theta=1e6, rope_parameters={"rope_theta": 1e6, "type": "default"}) == plain
    assert read(rope_theta=1e6, rope_scaling={"type": "default", "factor": 1}) == plain
    stretched = read(rope_theta=1e6, rope_scaling=YARN)
    assert stretched == read(rope_parameters={"rope_theta": 1e6, **YARN})
    old = {key: value for key, value in YARN.items() if key != "rope_type"} | {"type": "yarn"}
    assert stretched == read(rope_theta=1e6, rope_scaling=old)
    assert stretched == read(rope_theta=1e6, rope_scaling=old, rope_parameters=dict(YARN))


def test_yarn_defaults_and_given_values() -> None:
    spec = read(rope_theta=1e6, rope_scaling=YARN)
    assert spec == RopeSpec(
        theta=1e6,
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=32768,
        beta_fast=32.0,
        beta_slow=1.0,
        attention_factor=0.1 * math.log(4.0) + 1.0,
        truncate=True,
    )
    own = {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, "truncate": False}
    spec = read(rope_theta=1e6, rope_scaling=YARN | own)
    assert (spec.beta_fast, spec.beta_slow, spec.attention_factor) == (16.0, 2.0, 1.5)
    assert not spec.truncate


def test_yarn_original_length(caplog: pytest.LogCaptureFixture) -> None:
    bare = {"rope_type": "yarn", "factor": 4.0}
    outside = read(rope_theta=1e6, rope_scaling=bare, original_max_position_embeddings=1024)
    assert outside.original_max_position_embeddings == 1024
    assert not caplog.records
    assert read(rope_theta=1e6, rope_scaling=bare).original_max_position_embeddings == 40960
    assert "original_max_position_embeddings" in caplog.text
    with pytest.raises(CheckpointError, match="contradicts"):
        read(rope_theta=1e6, rope_scaling=YARN, original_max_position_embeddings=1024)


def test_theta_is_never_guessed() -> None:
    for keys in ({}, {"rope_scaling": YARN}, {"rope_parameters": {"rope_type": "default"}}):
        with pytest.raises(CheckpointError, match="no rope_theta"):
            read(**keys)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, "contradicts"),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": YARN}, "contradict each other"),
        ({"rope_theta": "1e6"}, "must be a number"),
        ({"rope_theta": float("nan")}, "finite number above 1"),
        ({"rope_theta": -1.0}, "finite number above 1"),
        ({"rope_theta": 1.0}, "finite number above 1"),
        ({"rope_theta": 1e6, "rope_parameters": [1]}, "must be an object"),
        ({"rope_theta": 1e6, "rope_scaling": "yarn"}, "must be an object"),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "yarn"}}, "lacks 'factor'"),
        ({"rope_theta": 1e6, "rope_scaling": YARN | {"factor": 0.5}}, "factor=0.5"),
        ({"rope_theta": 1e6, "rope_scaling": YARN | {"factor": "4"}}, "factor='4'"),
        ({"rope_theta": 1e6, "rope_scaling": YARN | {"beta_fast": 0.5}}, "at least beta_slow"),
        ({"rope_theta": 1e6, "rope_scaling": YARN | {"attention_factor": -1}}, "attention_factor"),
        ({"rope_theta": 1e6, "rope_scaling": YARN | {"truncate": 1}}, "truncate=1"),
        ({"rope_theta": 1e6, "rope_scaling": YARN | {"type": "default"}}, "must agree"),
        (
            {"rope_theta": 1e6, "rope_scaling": YARN | {"original_max_position_embeddings": 0}},
            "original_max_position_embeddings=0",
        ),
    ],
)
def test_contradictions(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(**keys)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"type": "dynamic", "alpha": 1000.0, "factor": 1.0}, "rope_type='dynamic'"),
        ({"rope_type": "linear", "factor": 2.0}, "rope_type='linear'"),
        ({"rope_type": "default", "factor": 2.0}, "factor=2.0"),
        ({"factor": 4.0, "original_max_position_embeddings": 32768}, "factor=4.0"),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "mscale, mscale_all_dim"),
        (YARN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"full_attention": {"rope_theta": 1e6}}, "full_attention"),
    ],
)
def test_other_kinds_are_refused_by_name(scaling: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read(rope_theta=1e6, rope_scaling=scaling)
