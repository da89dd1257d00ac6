"""`moestro generate` with the model that ships."""

import json
import signal
import time
from pathlib import Path

import pytest
from tests.cli.terminal import main, moestro, start

from moestro.cli.generate import DEFAULT_MAX_TOKENS, read_prompts
from moestro.errors import ConfigError
from moestro.kvstore.opening import open_backend
from moestro.weights.source import resolve_model

SMALL = ["--kv-cache-memory-bytes", "16MiB", "--num-threads", "1"]
PROMPT = "def quicksort(items):"
GREEDY = ["--temperature", "0", "--max-tokens", "12"]
FIELDS = {
    "request_id",
    "prompt",
    "prompt_token_ids",
    "outputs",
    "finished",
    "prompt_logprobs",
    "num_cached_tokens",
    "timing",
    "kv_hints",
}


def test_text_streams_to_stdout_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    done = moestro("generate", PROMPT, *GREEDY, *SMALL)
    assert done.returncode == 0, done.stderr
    assert main(["generate", PROMPT, *GREEDY, *SMALL, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    text = output["outputs"][0]["text"]
    assert done.stdout in (text, text + "\n")
    assert "tiny-hy3: bfloat16 on cpu" in done.stderr
    assert "12 generated" in done.stderr
    assert set(output) == FIELDS
    assert output["prompt"] == PROMPT
    assert output["outputs"][0]["finish_reason"] == "length"
    assert len(output["outputs"][0]["token_ids"]) == 12


@pytest.mark.parametrize("flag", ["--logprobs", "--prompt-logprobs"])
def test_what_text_can_not_show_needs_json(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", PROMPT, flag, "1", *SMALL]) == 2
    told = capsys.readouterr()
    assert f"{flag} has no effect here" in told.err
    assert "--json" in told.err
    assert told.out == ""


def test_several_prompts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("import os\n")
    arguments = ["generate", PROMPT, "--prompt-file", str(path), *GREEDY, *SMALL]
    assert main([*arguments, "--json", "--logprobs", "1", "--prompt-logprobs", "0"]) == 0
    outputs = json.loads(capsys.readouterr().out)
    assert [o["prompt"] for o in outputs] == [PROMPT, "import os\n"]
    first = outputs[0]["outputs"][0]
    token = str(first["token_ids"][0])
    assert next(iter(first["logprobs"][0])) == token
    assert first["logprobs"][0][token]["logprob"] <= 0
    assert outputs[0]["prompt_logprobs"][0] is None
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert f"=== {PROMPT}\n{first['text']}\n" in out
    assert out.index("=== import os") > out.index("=== def")


def test_prompt_from_stdin() -> None:
    done = moestro("generate", "-", "--json", *GREEDY, *SMALL, input="x = [")
    assert json.loads(done.stdout)["prompt"] == "x = ["


def test_n_sequences_of_one_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", PROMPT, "--n", "2", "--max-tokens", "4", *SMALL]) == 0
    out = capsys.readouterr().out
    assert out.startswith("[0] ")
    assert "\n[1] " in out


def test_default_length(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", PROMPT, "--ignore-eos", "--json", *SMALL]
    assert main(arguments) == 0
    output = json.loads(capsys.readouterr().out)
    assert len(output["outputs"][0]["token_ids"]) == DEFAULT_MAX_TOKENS


def test_prompts_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes("\u00e9".encode())
    assert read_prompts(["x", "y"], [str(path)]) == ["x", "y", "\u00e9"]


@pytest.mark.parametrize(
    ("given", "files", "message"),
    [
        ([], [], "No prompt"),
        (["-", "-"], [], "once"),
        (["-"], ["-"], "once"),
        ([], ["/no/such/file"], "No such file"),
        ([], ["/"], "directory"),
        ([], ["a\0b"], "null"),
    ],
)
def test_prompts_that_can_not_be_read(given: list[str], files: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_prompts(given, files)


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_max_new_tokens_of_the_checkpoint(
    json_flag: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for file in resolve_model("tiny-hy3").iterdir():
        (tmp_path / file.name).symlink_to(file)
    path = tmp_path / "generation_config.json"
    config = json.loads(path.read_text()) | {"max_new_tokens": 3}
    path.unlink()
    path.write_text(json.dumps(config))
    arguments = ["generate", PROMPT, "--model", str(tmp_path), "--ignore-eos", *SMALL, *json_flag]
    assert main(arguments) == 0
    assert ", 3 generated in" in capsys.readouterr().err
    assert main([*arguments, "--max-tokens", "5"]) == 0
    assert ", 5 generated in" in capsys.readouterr().err


def test_prompt_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="utf-8"):
        read_prompts([], [str(path)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "prompt is empty"),
        (["x", "--temperature", "nan"], "temperature must be in"),
        (["x", "--temperature", "warm"], "--temperature must be a number"),
        (["x", "--max-tokens", "0"], "max_tokens must be at least 1"),
        (["x", "--max-tokens", "-3"], "max_tokens must be at least 1"),
        (["x", "--top-p", "0"], "top_p must be in"),
        (["a " * 20_000], "maximum context length"),
        (["x", "--max-num-seqs", "0"], "max_num_seqs must be"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *arguments, *SMALL]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err


def test_a_prompt_that_is_no_unicode(capsys: pytest.CaptureFixture[str]) -> None:
    """What the shell passes on for bytes that are no UTF-8."""
    prompt = b"caf\xe9".decode("utf-8", "surrogateescape")
    assert main(["generate", prompt, *SMALL]) == 2
    assert "lone surrogate" in capsys.readouterr().err


def test_ten_megabytes_of_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "long"
    path.write_bytes(b"x" * 10_000_000)
    assert main(["generate", "--prompt-file", str(path), *SMALL]) == 2
    told = capsys.readouterr().err
    assert "maximum context length" in told
    assert len(told) < 5000


def test_nul_bytes_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nul"
    path.write_bytes(b"x\0y")
    assert main(["generate", "--prompt-file", str(path), "--json", *GREEDY, *SMALL]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "x\0y"


def test_interrupt_ends_it_with_130() -> None:
    process = start("generate", PROMPT, "--ignore-eos", "--max-tokens", "8000", *SMALL)
    assert process.stdout is not None
    process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert time.monotonic() - started < 30


def test_termination_ends_it_with_143_and_its_pages_written(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path / 'kv'}"
    tiers = ["--kv-store", url, "--cache-dir", str(tmp_path / "cache"), "--page-size", "16"]
    process = start("generate", PROMPT * 9, "--ignore-eos", "--max-tokens", "8000", *tiers, *SMALL)
    assert process.stdout is not None
    process.stdout.read(60)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 143, told
    assert "Traceback" not in told
    store = open_backend(url, capacity_bytes=1 << 30)
    assert sum(n.num_pages for n in store.namespaces()) >= 2
    store.close()


def test_disk_full_while_it_streams() -> None:
    with Path("/dev/full").open("w") as full:
        done = moestro(
            "generate", PROMPT, *GREEDY, *SMALL, capture_output=False, stdout=full, stderr=-1
        )
    assert done.returncode == 1
    assert done.stderr.endswith("moestro: error: No space left on device\n")
