"""`moestro eval routing`: its table, its JSON, and what it says of bad input."""

import json
from pathlib import Path

import pytest
from tests.cli.terminal import main


def test_json_counts_every_layer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text("def add(a, b):\n    return a + b\n" * 20)
    command = ["eval", "routing", "--text", str(text), "--num-tokens", "200", "--window", "64"]
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["num_tokens"] == 200
    assert [layer["num_tokens"] for layer in told["layers"]] == [200] * len(told["layers"])
    total = told["total"]
    assert total["num_tokens"] == 200 * len(told["layers"])
    assert total["flipped"] == sum(layer["flipped"] for layer in told["layers"]) == 0
    assert total["flipped_bf16_logits"] > total["flipped"]
    assert told["text"] == str(text)


def test_table_over_the_default_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "routing", "--num-tokens", "100", "--dtype", "float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "100 tokens of Python" in lines[0]
    assert lines[2].split("  ")[0].strip() == "layer"
    assert lines[-1].split()[0] == "all"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--text", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--num-tokens", "0"], "--num-tokens must be at least 1, got 0"),
        (["--window", "-3"], "--window must be at least 1, got -3"),
    ],
)
def test_bad_input_is_named(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "routing", *flags]) == 2
    assert said in capsys.readouterr().err


def test_text_that_is_empty_or_not_utf8(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"\xff\xfe")
    assert main(["eval", "routing", "--text", str(text)]) == 2
    assert "not UTF-8" in capsys.readouterr().err
    text.write_bytes(b"")
    assert main(["eval", "routing", "--text", str(text)]) == 2
    assert "empty" in capsys.readouterr().err
