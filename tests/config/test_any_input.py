"""Whatever is written, the outcome is a checked configuration or a ConfigError, nothing else."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moestro.config import EngineConfig, ServerConfig
from moestro.config.knob import knobs_of
from moestro.config.sources import read_yaml
from moestro.config.vllm_names import FOREIGN_NAMES
from moestro.errors import ConfigError

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=4)
    | st.sampled_from(["32k", "4GiB", "1e999", "-0", "auto", "none", "{}", "[]", "0x1", "1_0"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


def outcome(owner: Any, name: str, value: Any) -> tuple[Any, str]:
    """(the configuration, "") or (None, the message)."""
    try:
        return owner.from_kwargs(**{name: value}), ""
    except ConfigError as error:
        return None, str(error)


@given(name=st.sampled_from([*knobs_of(EngineConfig), *FOREIGN_NAMES, "nonsense"]), value=VALUES)
def test_engine_keywords(name: str, value: Any) -> None:
    config, message = outcome(EngineConfig, name, value)
    if config is None:
        assert name in message
        return
    # what was accepted is in normal form: checking it again changes nothing
    assert EngineConfig.from_kwargs(**vars(config)) == config


@given(name=st.sampled_from(list(knobs_of(ServerConfig))), value=VALUES)
def test_server_keywords(name: str, value: Any) -> None:
    config, message = outcome(ServerConfig, name, value)
    if config is None:
        assert name in message
        return
    assert ServerConfig.from_kwargs(**vars(config)) == config


@given(text=st.text(alphabet="ab:-[]{}&*!?|>'\"#%@ \n\t\x000123.e~<=", max_size=40))
@example(text="a: 2024-13-45\n")
@example(text="? {a: 1}\n: 2\n")
@example(text="{[1]: 2}")
@example(text="<<: 1\n")
@example(text="<<: [1]\n")
@example(text="a: &x [*x]\n")
@example(text="[" * 1000)
@example(text="a: !!float nonsense\n")
@example(text="a: !!int 1:99:x\n")
@example(text="a: !!binary \xff\n")
@example(text="a: !!timestamp nope\n")
@example(text="a: !!bool nope\n")
@example(text="a: !!int ''\n")
@example(text="a: " + "9" * 5000 + "\n")
def test_yaml_text(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text)
    try:
        options = read_yaml(path)
        EngineConfig.from_yaml(path)
    except ConfigError:
        return
    assert all(isinstance(name, str) for name in options)
