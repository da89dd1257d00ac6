"""Exit codes, error lines, and what is imported when."""

import errno
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.cli.terminal import environment, main, moestro

from moestro.cli import main as main_module
from moestro.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    RequestError,
    UnsupportedError,
)


def failing_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `moestro ops` raise."""

    def run(_: object) -> int:
        raise error

    assert isinstance(main_module.ops, ModuleType)
    monkeypatch.setattr(main_module.ops, "run", run)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ImportError("no torch"), "can't be loaded: no torch. moestro doctor"),
        (MemoryError(), "out of memory (MemoryError()). moestro plan"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            "out of memory (RuntimeError(",
        ),
        (RuntimeError("surprise"), "unexpected RuntimeError: surprise (a bug"),
    ],
)
def test_what_nobody_foresaw(
    error: Exception,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing_with(error, monkeypatch)
    assert main(["ops"]) == 1
    assert told in capsys.readouterr().err


def test_what_would_steer_the_terminal_is_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_with(CheckpointError("key a\x1b[31m\u202eb\n\xe9"), monkeypatch)
    assert main(["ops"]) == 1
    assert capsys.readouterr().err == "moestro: error: key a\\x1b[31m\\u202eb \xe9\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no such option"), 2),
        (RequestError("bad prompt", "prompt"), 2),
        (CheckpointError("torn file"), 1),
        (UnsupportedError("no body"), 1),
        (CapacityError("too big"), 1),
        (EngineDeadError("gone"), 1),
        (OSError(errno.ENOSPC, "No space left on device", "out.json"), 1),
        (ValueError("surprise"), 1),
    ],
)
def test_errors_are_one_line(
    error: Exception,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing_with(error, monkeypatch)
    assert main(["ops"]) == code
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("moestro: error: ")
    assert told.err.count("\n") == 1
    words = str(error.strerror if isinstance(error, OSError) else error)
    assert words in told.err


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_debugging_shows_the_traceback(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_with(ConfigError("bad"), monkeypatch)
    if how == "variable":
        monkeypatch.setenv("MOESTRO_LOG_LEVEL", "debug")
    assert main(["ops", "--debug"] if how == "flag" else ["ops"]) == 2
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert told.endswith("moestro: error: bad\n")


def test_a_message_of_several_lines_becomes_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_with(CheckpointError("first\n  second"), monkeypatch)
    main(["ops"])
    assert capsys.readouterr().err == "moestro: error: first second\n"


def test_interrupt_and_broken_pipe_are_quiet(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failing_with(KeyboardInterrupt(), monkeypatch)
    assert main(["ops"]) == 130
    assert capfd.readouterr() == ("", "")


def test_nobody_reads_the_output() -> None:
    command = f"{sys.executable} -m moestro ops | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment()
    )
    assert done.stdout.strip() in ("0", "141")
    assert done.stderr == ""


def test_disk_full() -> None:
    with Path("/dev/full").open("w") as full:
        done = moestro("plan", "--json", capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == "moestro: error: No space left on device\n"


@pytest.mark.parametrize(
    ("arguments", "closed", "code", "told"),
    [
        (["plan"], "2>&-", 0, "tiny-hy3"),
        (["plan"], "<&-", 0, "tiny-hy3"),
        (["plan"], ">&-", 1, "Bad file descriptor"),
        (["--version"], ">&-", 1, "Bad file descriptor"),
        (["plan", "--json"], ">&- 2>&- <&-", 1, ""),
        (["generate", "-"], "<&-", 2, "prompt"),
        (["--version"], ">/dev/full", 1, "No space left on device"),
    ],
)
def test_closed_streams(arguments: list[str], closed: str, code: int, told: str) -> None:
    command = shlex.join([sys.executable, "-m", "moestro", *arguments])
    done = subprocess.run(
        ["bash", "-c", f"{command} {closed}"], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == code
    assert told in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "unexpected" not in done.stderr


@pytest.mark.parametrize("arguments", [[], ["fly"]])
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    assert "usage: moestro" in capsys.readouterr().err


def test_a_bad_variable_is_a_user_mistake() -> None:
    done = moestro("plan", env={"MOESTRO_LOG_LEVEL": "shout"})
    assert done.returncode == 2
    assert "MOESTRO_LOG_LEVEL='shout'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plan", "tiny-hy3"], ["serve", "--help"], ["kv", "ls", "--help"]]
)
def test_light_commands_import_neither_torch_nor_servers(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "for name in ('torch', 'fastapi', 'uvicorn', 'tokenizers', 'safetensors', 'numpy'):\n"
        "    sys.modules[name] = None\n"
        "from moestro.cli.main import main\n"
        f"sys.exit(main({arguments!r}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out.startswith("moestro ")
