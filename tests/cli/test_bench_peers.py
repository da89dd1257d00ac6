"""`moestro bench peers`: rounds, bounds, workers and flags; no other engine is started."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from tests.cli.terminal import main

from moestro.cli.bench import bound, report
from moestro.cli.bench.flags import engine_fields, names
from moestro.cli.bench.pairing import Round, measure_rounds, rotated, summary
from moestro.cli.bench.peers import ENGINES, MEASURES, PEERS
from moestro.cli.bench.statistics import median_interval
from moestro.cli.bench.workers import Worker, read_record, versions
from moestro.core.model_config import load_model_spec
from moestro.core.model_spec import ModelSpec
from moestro.core.weight_format import WeightFormat
from moestro.errors import ConfigError, MoestroError

WORKER = """
import json, sys
print(json.dumps({"ready": True, "versions": {}}), flush=True)
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "quit":
        break
    if command["do"] == "fail":
        sys.exit("no such thing")
    print(json.dumps({"seconds": 0.5, "asked": command}), flush=True)
"""


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    root = Path(__file__).parents[2] / "src" / "moestro" / "bundled" / "tiny-hy3"
    return load_model_spec(root)


def test_interval_holds_the_median_and_is_repeatable() -> None:
    values = [1.0, 1.1, 1.2, 1.3, 1.4, 9.0]
    low, high = median_interval(values)
    assert 1.0 <= low <= 1.25 <= high <= 9.0
    assert (low, high) == median_interval(values)
    assert median_interval([2.0]) == (2.0, 2.0)


def test_every_engine_is_first_equally_often() -> None:
    orders = [rotated(("a", "b", "c"), turn) for turn in range(3)]
    assert sorted(order[0] for order in orders) == ["a", "b", "c"]
    assert rotated(("a", "b"), 1) == ["b", "a"]


def test_unsteady_rounds_are_dropped_and_made_up_for() -> None:
    bandwidths = iter([50.0, 51.0, 70.0, 69.0, 70.0])
    asked: list[str] = []

    def ask(name: str) -> float:
        asked.append(name)
        return 1.0 if name == "ours" else 2.0

    rounds = list(measure_rounds(ask, ("ours", "theirs"), lambda: next(bandwidths), 3))
    assert [r.is_steady for r in rounds] == [True, False, True, True]
    assert asked == ["ours", "theirs", "theirs", "ours"] * 2
    told = summary(
        rounds, "ours", {"ours": 10, "theirs": 10}, {"ours": lambda bandwidth: 35 / bandwidth}
    )
    assert (told["pairs"], told["dropped"], told["unsteady"]) == (3, 1, False)
    assert told["engines"]["theirs"]["ratio"] == 2.0
    assert told["engines"]["ours"]["tokens_per_s"] == 10.0
    assert told["engines"]["ours"]["share_of_bound"] == pytest.approx(35 / 69.5)


def test_rounds_end_where_nothing_is_steady() -> None:
    values = iter(range(1, 100))
    rounds = list(measure_rounds(lambda _: 1.0, ("ours",), lambda: 10.0 ** next(values), 4))
    assert len(rounds) == 6
    assert summary(rounds, "ours", {"ours": 1}, {})["unsteady"]


def test_bytes_of_rows() -> None:
    assert bound.row_bytes("bfloat16", 64) == 128
    assert bound.row_bytes("w8a8", 64) == 68
    assert bound.row_bytes("w4a8", 64) == 36
    for name, fields in ENGINES.items():
        if fields:
            made = WeightFormat(fields["quantization"], fields.get("quantization_group_size", 0))
            assert bound.row_bytes(bound.OURS[name].layers, 64) == made.row_bytes(64)
    assert bound.row_bytes("q8_0", 64) == 68
    assert bound.row_bytes("q4_0", 64) == 36
    with pytest.raises(KeyError):
        bound.row_bytes("int3", 64)


def test_all_matrices_add_up_to_the_parameters(spec: ModelSpec) -> None:
    assert spec.moe is not None
    count = sum(m.count * m.rows * m.width for m in bound.matrices(spec))
    norms = spec.hidden_size + sum(
        2 * spec.hidden_size + 2 * spec.head_dim for _ in spec.moe_layers
    )
    biases = spec.moe.num_experts * sum(spec.moe_layers) * spec.moe.has_expert_bias
    tables = spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2)
    assert count + norms + biases + tables == spec.num_parameters


def test_work_grows_with_batch_and_width(spec: ModelSpec) -> None:
    one, eight = (bound.step_bytes(spec, bound.OURS["bf16"], batch, 64) for batch in (1, 8))
    narrow = bound.step_bytes(spec, bound.OURS["w4a8"], 1, 64)
    assert narrow < one < eight < 8 * one
    assert bound.experts_used(16, 4, 1) == pytest.approx(4)
    assert bound.experts_used(16, 4, 10**6) == pytest.approx(16)
    for measure in MEASURES.values():
        read, operations = measure.work(spec, bound.OURS["w8a8"])
        assert read > 0
        assert operations > 2 * measure.tokens * spec.hidden_size


def state_of(pid: int) -> str:
    """The kernel's letter for a process; a second is left for it to become T."""
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            break
        time.sleep(0.01)
    return state


def test_a_worker_answers_and_is_stopped_between(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    worker = Worker("fake", [sys.executable, str(script)], [{"do": "first"}])
    try:
        assert state_of(worker._process.pid) == "T"
        assert worker.ask({"do": "decode"})["asked"] == {"do": "decode"}
        assert worker.memory()["peak_memory_bytes"] > 0
    finally:
        worker.close()
    assert worker._process.returncode == 0


def test_a_worker_that_ends_is_named(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with pytest.raises(MoestroError, match="fake ended without an answer"):
        Worker("fake", [sys.executable, str(script)], [{"do": "fail"}])
    with pytest.raises(ConfigError, match="can't be started"):
        Worker("fake", [str(tmp_path / "missing")], [])


def test_record_of_installed_peers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"install\.py"):
        read_record(tmp_path)
    (tmp_path / "peers.json").write_text('{"hf": {"version": "5"}}')
    with pytest.raises(ConfigError, match="names no workers"):
        read_record(tmp_path)
    (tmp_path / "peers.json").write_text('{"hf": {"version": "5", "worker": ["a"]}}')
    assert read_record(tmp_path)["hf"]["worker"] == ["a"]


def test_results_tell_versions_and_no_paths() -> None:
    told = {"version": "5", "torch": "2", "worker": ["/opt/python", "a.py"], "source": "/opt/src"}
    assert versions(told) == {"version": "5", "torch": "2"}


def test_lists_and_objects_given_as_flags() -> None:
    assert names("--peers", "hf, vllm,hf", PEERS) == ("hf", "vllm")
    with pytest.raises(ConfigError, match="does not know sglang"):
        names("--peers", "sglang", PEERS)
    with pytest.raises(ConfigError, match="names nothing"):
        names("--peers", " ,", PEERS)
    assert engine_fields('{"seed": 1}', {"model"}) == {"seed": 1}
    for text in ("[1]", "{"):
        with pytest.raises(ConfigError, match="--engine"):
            engine_fields(text, ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pairs", "0"], "--pairs must be at least 1"),
        (["--num-threads", "0"], "--num-threads must be 1 to 1024, got 0."),
        (["--num-threads", "1025"], "--num-threads must be 1 to 1024, got 1025."),
        *(
            (["--engine", json.dumps({"seed": 1, field: 1})], f"--engine can't set {field}:")
            for field in ("model", "num_threads", "quantization", "quantization_group_size")
        ),
        (["--formats", "fp4"], "--formats does not know fp4"),
        (["--peers", "vllm"], "vllm is not installed"),
        (["--peers", "llama.cpp"], "name their folder with --gguf"),
        (["--chart", "chart.png"], "ends in .svg"),
        (["--output", "/nowhere/out.json"], "--output /nowhere/out.json can't be written"),
        (["--output", "/proc/nope"], "--output /proc/nope can't be written"),
    ],
)
def test_flags_that_can_not_be(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"hf": {"worker": ["x"]}, "llama.cpp": {"worker": ["x"]}}
    (tmp_path / "peers.json").write_text(json.dumps(record))
    where = ["--model", str(tmp_path), "--peers-dir", str(tmp_path)]
    assert main(["bench", "peers", *where, "--peers", "hf", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_trying_the_output_leaves_no_trace(tmp_path: Path) -> None:
    kept, new, link = (tmp_path / name for name in ("kept", "new", "link"))
    kept.write_text("before")
    link.symlink_to(new)
    for path in (kept, new, link):
        report.check_output(path)
    assert kept.read_text() == "before"
    assert not new.exists()
    assert link.is_symlink()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    report.check_output(pipe)  # would wait for a reader


def test_tables_show_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [Round({"moestro": 1.0, "hf": 2.0}, 50e9, 50e9)] * 3
    told = summary(rounds, "moestro", {"moestro": 32, "hf": 32}, {})
    limits = {"bf16_flops_per_s": 1e12, "int8_ops_per_s": 2e12, "read_bytes_per_s": 50e9}
    memory = {"peak_memory_bytes": 10**9, "peak_rss_bytes": 2 * 10**9}
    report.print_peers(
        {
            "threads": 2,
            "limits": limits,
            "rows": [{"format": "bf16", "measure": "decode-1", **told}],
            "engines": {"hf bf16": memory},
        }
    )
    out = capsys.readouterr().out
    assert "2.00 (2.00-2.00)" in out
    assert "bf16 decode-1" in out
    assert "3 (-0)" in out
