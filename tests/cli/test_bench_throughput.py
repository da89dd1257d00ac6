"""`moestro bench throughput`: what it reports, and that the parts add up."""

import json
import random
import subprocess
import sys

import pytest
from tests.cli.terminal import main

from moestro.cli.bench.memory import PeakMemory, peak_rss_bytes, resident_bytes
from moestro.cli.bench.statistics import median, percentile

SMALL = ["--kv-cache-memory-bytes", "16MiB", "--num-threads", "1"]
LOAD = ["--input-len", "20", "--output-len", "5", "--batch-size", "3"]
RUNS = ["--repeats", "2", "--warmup", "0"]


def test_json_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", *LOAD, *RUNS, *SMALL, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["prefill_tokens_per_s"] > 0
    assert told["decode_tokens_per_s"] > 0
    step = told["decode_step_ms"]
    assert 0 < step["min"] <= step["median"] <= step["p90"] <= step["max"]
    assert told["num_decode_steps"] == 2 * 4
    assert len(told["prefill_ms"]) == 2
    assert told["peak_memory_bytes"] >= told["plan"]["weight_bytes"]
    assert told["peak_rss_bytes"] > 0
    assert told["versions"]["torch"].startswith("2.")
    assert told["machine"]["num_threads"] >= 1
    assert told["command"].startswith("moestro bench throughput --input-len 20")
    assert told["plan"]["model"] == told["model"] == "tiny-hy3"


def test_sampling_flags_reach_the_requests(capsys: pytest.CaptureFixture[str]) -> None:
    sampling = ["--temperature", "0.8", "--top-k", "20", "--logprobs", "1", "--max-tokens", "5"]
    assert main(["bench", "throughput", *LOAD, *RUNS, *SMALL, *sampling, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["sampling_params"]
    assert (told["temperature"], told["top_k"], told["logprobs"]) == (0.8, 20, 1)
    assert (told["max_tokens"], told["ignore_eos"], told["detokenize"]) == (5, True, False)


def test_one_token_has_no_decode(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--input-len", "9", "--output-len", "1", *RUNS, *SMALL, "--json"]
    assert main(["bench", "throughput", *arguments]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["decode_tokens_per_s"] is None
    assert told["decode_step_ms"] is None


def test_lines_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", *LOAD, *RUNS, *SMALL]) == 0
    out = capsys.readouterr().out
    assert "prefill" in out
    assert "tokens/s" in out
    assert "peak memory" in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--input-len", "0"], 2, "--input-len must be at least 1"),
        (["--repeats", "-1"], 2, "--repeats must be at least 1"),
        (["--warmup", "-1"], 2, "--warmup must be at least 0"),
        (["--batch-size", "5", "--max-num-seqs", "4"], 2, "max_num_seqs 4"),
        (["--batch-size", "128", "--input-len", "512"], 1, "KV pages"),
        (["--input-len", "9000"], 2, "context length"),
        (["--tensor-parallel-size", "2"], 2, "not available"),
        (["--max-tokens", "3"], 2, "--max-tokens has no effect here: --output-len"),
        (["--no-ignore-eos"], 2, "--ignore-eos has no effect here"),
        (["--n", "2"], 2, "--batch-size"),
        (["--temperature", "nan"], 2, "temperature"),
    ],
)
def test_loads_that_can_not_run(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kv = ["--kv-cache-memory-bytes", "64MiB"]
    assert main(["bench", "throughput", *arguments, *kv, "--num-threads", "1"]) == code
    told = capsys.readouterr()
    assert message in told.err
    assert told.out == ""


def test_percentiles_are_numpys() -> None:
    numpy = pytest.importorskip("numpy")
    draw = random.Random(3)
    for size in (1, 2, 3, 10, 101):
        values = [draw.random() for _ in range(size)]
        for share in (0.0, 0.1, 0.5, 0.9, 1.0):
            assert percentile(values, share) == pytest.approx(numpy.quantile(values, share))
    assert median([3.0, 1.0, 2.0]) == 2.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_peak_memory_sees_what_was_given_back() -> None:
    size = 200_000_000
    with PeakMemory() as memory:
        before = resident_bytes()
        block = bytearray(size)
        block[::4096] = b"x" * len(block[::4096])
        grown = resident_bytes()
        del block
    assert grown - before > 0.9 * size
    assert memory.peak_bytes > before
    assert peak_rss_bytes() >= 0.9 * size


def test_memory_of_another_process() -> None:
    size = 100_000_000
    code = f"x = bytearray(b'x') * {size}; print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        with PeakMemory(child.pid) as memory:
            assert child.stdout.readline() == "ready\n"
        assert size < memory.peak_bytes < 2 * size
        assert peak_rss_bytes(child.pid) > size
        child.communicate("\n")
    assert resident_bytes(child.pid) == 0
