"""A sequence that ends in an error is told, and the command fails."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cli.terminal import main, moestro

from moestro.weights.source import resolve_model

SMALL = ("--kv-cache-memory-bytes", "4MiB", "--num-threads", "1", "--log-level", "warning")
TOLD = "the model produced logits that are not finite"


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model that ships, with one weight that is no number."""
    folder = tmp_path_factory.mktemp("damaged") / "model"
    shutil.copytree(resolve_model("tiny-hy3"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][7] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "which"),
    [
        (["x"], ""),
        (["x", "--n", "3"], "3 of 3 sequences: "),
        (["x", "y"], "2 of 2 sequences: "),
        (["x", "--json"], ""),
    ],
)
def test_generate(
    damaged: str, arguments: list[str], which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *arguments, "--model", damaged, "--max-tokens", "2", *SMALL]) == 1
    told = capsys.readouterr()
    assert f"moestro: error: {which}{TOLD}" in told.err
    if "--json" in arguments:
        assert json.loads(told.out)["outputs"][0]["finish_reason"] == "error"


def test_bench(damaged: str, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--input-len", "4", "--output-len", "2", "--repeats", "1", "--warmup", "0"]
    assert main(["bench", "throughput", "--model", damaged, *lengths, *SMALL]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "can't be run to its end: " + TOLD in told.err


def test_chat(damaged: str) -> None:
    template = "{{ messages[0].content }}"
    flags = ["--chat-template", template, "--max-tokens", "2", *SMALL]
    done = moestro("chat", damaged, *flags, input="hello\nagain\n")
    assert done.returncode == 1
    assert done.stderr.count(TOLD) == 1
