"""`moestro chat`, with piped input."""

import io
import json
from pathlib import Path

import pytest
from tests.cli.terminal import main, moestro

from moestro.weights.source import resolve_model

SMALL = ["--kv-cache-memory-bytes", "16MiB", "--num-threads", "1", "--max-tokens", "5"]


@pytest.fixture
def template(tmp_path: Path) -> str:
    """A template that shows its messages by role and content."""
    path = tmp_path / "chat.jinja"
    path.write_text(
        "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}# assistant:"
    )
    return str(path)


def chat(monkeypatch: pytest.MonkeyPatch, lines: str, *arguments: str) -> int:
    """`moestro chat` with `lines` as its input."""
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return main(["chat", *arguments, "--temperature", "0", *SMALL])


def test_each_line_is_answered(
    template: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "hello\n\n/reset\n/system be kind\nhello\n/wrong\n/exit\nnever\n"
    assert chat(monkeypatch, lines, "tiny-hy3", "--chat-template", template) == 0
    told = capsys.readouterr()
    assert told.out.strip()
    assert "forgotten" in told.err
    assert "system prompt set" in told.err
    assert "unknown command /wrong" in told.err


def test_answers_stay_in_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The template says how many messages it saw: the stop text of each answer."""
    counting = (
        "{% for m in messages %}{{ m.role }} {% endfor %}{{ raise_exception(messages|length) }}"
    )
    assert chat(monkeypatch, "one\n", "--chat-template", counting) == 2
    assert "refused the conversation: 1" in capsys.readouterr().err
    growing = (
        "{% if messages|length > 2 %}{{ raise_exception(messages[1].content) }}{% endif %}x = ["
    )
    assert chat(monkeypatch, "one\ntwo\n", "--chat-template", growing) == 2
    told = capsys.readouterr()
    assert told.out.strip() in told.err


def test_flags_that_a_conversation_can_not_honour(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--n", "2", *SMALL]) == 2
    assert "--n has no effect here: a conversation" in capsys.readouterr().err


def test_end_of_input_ends_it() -> None:
    done = moestro("chat", *SMALL, input="hello")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")


def test_without_a_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in resolve_model("tiny-hy3").iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert chat(monkeypatch, "hello\n", str(tmp_path)) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "--chat-template" in told.err
