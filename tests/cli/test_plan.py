"""`moestro plan`: the numbers of the plan, from config.json alone."""

import json
from pathlib import Path

import pytest
from tests.cli.terminal import main

from moestro.weights.source import resolve_model

GIANT = {
    "num_hidden_layers": 80,
    "hidden_size": 4096,
    "intermediate_size": 13312,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 192,
    "moe_intermediate_size": 1536,
    "expert_hidden_dim": 1536,
    "vocab_size": 120832,
}


@pytest.fixture
def giant(tmp_path: Path) -> str:
    """A folder with a config.json of some 300 G parameters and nothing else."""
    config = json.loads((resolve_model("tiny-hy3") / "config.json").read_text())
    kept = {key: value for key, value in GIANT.items() if key in config}
    assert len(kept) >= 9
    (tmp_path / "config.json").write_text(json.dumps({**config, **kept}))
    return str(tmp_path)


def test_json_is_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny-hy3", "--json", "--kv-cache-memory-bytes", "64MiB"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is True
    assert plan["model"] == "tiny-hy3"
    assert plan["num_parameters"] == 11_029_952
    assert plan["kv_cache_bytes"] <= 64 * 2**20
    assert plan["num_pages"] * plan["page_size"] == plan["max_context_tokens"]
    parts = plan["weight_bytes"] + plan["kv_cache_bytes"] + plan["buffer_bytes"]
    assert plan["total_bytes"] == parts


def test_lines_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 0
    out = capsys.readouterr().out
    assert "tiny-hy3: bfloat16 on cpu" in out
    assert "11,029,952 parameters" in out
    assert "2,135,440 more for MTP" in out


def test_what_does_not_fit_is_an_error_that_says_what_would(
    giant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", giant]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "does not fit" in told.err
    assert "GB" in told.err


def test_fit_answers_even_then(giant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", giant, "--fit", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fits"] is False
    assert report["missing_bytes"] > 0
    assert "does not fit" in report["shortage"]
    assert main(["plan", giant, "--fit"]) == 0
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/folder/here"], "does not exist"),
        (["tiny-hy3", "--model", "other"], "given twice"),
        (["tiny-hy3", "--max-model-len", "many"], "max_model_len must be"),
        (["tiny-hy3", "--quantization", "w2a8"], "w2a8"),
        (["tiny-hy3", "--config", "/no/such.yaml"], "/no/such.yaml"),
        (["tiny\0hy3"], "model must be"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("model: tiny-hy3\nmax-model-len: 256\nport: 1234\n")
    assert main(["plan", "--config", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_model_len"] == 256
    assert main(["plan", "--config", str(path), "--max-model-len", "512", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_model_len"] == 512
