"""Environment variables: read when asked for, and loud about nonsense."""

from pathlib import Path
from typing import Any

import pytest

from moestro import envs
from moestro.errors import ConfigError


def test_defaults_when_unset_or_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (None, "", "  "):
        for variable in envs.ALL:
            if text is None:
                monkeypatch.delenv(variable.name, raising=False)
            else:
                monkeypatch.setenv(variable.name, text)
            if variable is not envs.CACHE_DIR:
                assert variable.get() == variable.default


def test_values_are_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESTRO_CPU_ISA", "AVX2")
    assert envs.CPU_ISA.get() == "avx2"
    monkeypatch.setenv("MOESTRO_CPU_ISA", "portable")
    assert envs.CPU_ISA.get() == "portable"


def test_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("MOESTRO_CACHE_DIR", raising=False)
    assert envs.CACHE_DIR.get() == Path("/home/me/.cache/moestro")
    monkeypatch.setenv("MOESTRO_CACHE_DIR", "~/here")
    assert envs.CACHE_DIR.get() == Path("/home/me/here")
    monkeypatch.setenv("MOESTRO_PEERS_PYTHON", "/opt/python")
    assert envs.PEERS_PYTHON.get() == Path("/opt/python")


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        (envs.CPU_ISA, "sse9"),
        (envs.LOG_LEVEL, "loud"),
        (envs.CACHE_DIR, "~nobody-of-that-name/x"),
        (envs.PEERS_PYTHON, "~nobody-of-that-name/x"),
    ],
)
def test_bad_value_names_variable_value_and_choices(
    variable: "envs.EnvVar[Any]", text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(ConfigError) as caught:
        variable.get()
    for part in (variable.name, text, variable.values):
        assert part in str(caught.value)


def test_misspelt_variables_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert envs.unknown_names() == ()
    monkeypatch.setenv("MOESTRO_CPU_LSA", "avx2")
    monkeypatch.setenv("MOESTRO_CPU_ISA", "avx2")
    assert envs.unknown_names() == ("MOESTRO_CPU_LSA",)


def test_every_variable_is_declared_once_with_a_doc() -> None:
    names = [variable.name for variable in envs.ALL]
    assert len(set(names)) == len(names)
    for variable in envs.ALL:
        assert variable.name.startswith("MOESTRO_")
        assert variable.doc
