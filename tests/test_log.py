"""Log lines go to stderr only, once, at the level asked for."""

import logging
from collections.abc import Iterator

import pytest

from moestro.errors import ConfigError
from moestro.log import setup_logging


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    logger = logging.getLogger("moestro")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_level_and_stream(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("warning")
    setup_logging("warning")  # a second call must not double the lines
    logging.getLogger("moestro.some.module").info("quiet")
    logging.getLogger("moestro.some.module").warning("told %d", 1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("told 1") == 1
    assert "quiet" not in captured.err


def test_level_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOESTRO_LOG_LEVEL", "debug")
    setup_logging()
    logging.getLogger("moestro.x").debug("deep")
    assert "deep" in capsys.readouterr().err


def test_a_misspelt_variable_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOESTRO_LOGLEVEL", "debug")
    setup_logging()
    assert "MOESTRO_LOGLEVEL is not known" in capsys.readouterr().err


def test_unknown_level() -> None:
    with pytest.raises(ConfigError, match="chatty"):
        setup_logging("chatty")


def test_other_loggers_are_left_alone() -> None:
    before = list(logging.getLogger().handlers)
    setup_logging("debug")
    assert logging.getLogger().handlers == before
