"""`moestro bench kv`: a short replay as table, JSON and chart, and flags that can't be."""

import json
from pathlib import Path

import pytest

from moestro.cli.bench import kv_report
from moestro.cli.bench.kv import TRACES, trace_path
from moestro.cli.main import main

FEW = ["bench", "kv", "--max-requests", "60", "--lanes", "2,4"]


def test_json_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "kv.json"
    assert main([*FEW, "--device-tokens", "200k,2m", "--json", "--output", str(output)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["num_requests"] == 60
    assert told["command"].startswith("moestro bench kv --max-requests 60")
    points = told["points"]
    assert [(p["lanes"], p["device_tokens"]) for p in points] == [
        (2, 200_000),
        (2, 2_000_000),
        (4, 200_000),
        (4, 2_000_000),
    ]
    for point in points:
        parts = sum(point[f"{tier}_hit_rate"] for tier in ("device", "host", "store"))
        assert point["hit_rate"] == pytest.approx(parts)
        assert point["hit_rate"] <= point["ideal_hit_rate"] + 1e-9
        assert point["num_requests"] + point["num_refused"] == 60
        computed = point["queries_tokens"] * (1 - point["hit_rate"])
        assert point["num_prefill_tokens"] >= round(computed)
    assert points[1]["hit_rate"] == pytest.approx(points[1]["ideal_hit_rate"])
    assert points[0]["hit_rate"] <= points[1]["hit_rate"]
    assert json.loads(output.read_text())["points"][0]["lanes"] == 2


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FEW, "--trace", "mooncake", "--device-tokens", "1m"]) == 0
    out = capsys.readouterr().out
    assert "conversation_trace: 60 requests of 60 sessions" in out
    assert "4: 1M" in out


def test_chart(tmp_path: Path) -> None:
    chart = tmp_path / "kv.svg"
    assert main([*FEW, "--device-tokens", "1m", "--chart", str(chart)]) == 0
    assert chart.read_text().startswith("<?xml")


def test_runs_with_hints_are_marks_beside_those_without(tmp_path: Path) -> None:
    output, chart = tmp_path / "kv.json", tmp_path / "kv.svg"
    results = []
    for more in ([], ["--hints"]):
        flags = ["--lanes", "2", "--device-tokens", "200k,1m", "--output", str(output)]
        assert main([*FEW, *flags, *more]) == 0
        results.append(json.loads(output.read_text()))
    result = results[0]
    kv_report.draw_hits(result, chart)
    assert "with hints" not in chart.read_text()
    result["points"] += results[1]["points"]
    kv_report.draw_hits(result, chart)
    assert "with hints" in chart.read_text()


def test_sizes_are_told_short() -> None:
    point = {"device_tokens": 499_968, "host_tokens": 1_999_936, "store_tokens": 0}
    assert kv_report.size(point) == "500k + 2M"
    assert kv_report.size({**point, "host_tokens": 0}) == "500k"


def test_traces_are_there() -> None:
    assert all(trace_path(name).is_file() for name in TRACES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "nowhere"], "--trace must be weka, mooncake or a file, got 'nowhere'"),
        (["--lanes", "0"], "--lanes takes a whole number from 1 to 4,096, or several, got '0'"),
        (["--lanes", "2,x"], "got '2,x'"),
        (["--device-tokens", "63"], "--device-tokens takes a whole number from 64"),
        (["--host-tokens=-1"], "--host-tokens takes a whole number from 0"),
        (["--max-requests", "0"], "--max-requests takes"),
        (["--every", "0"], "--every takes"),
        (["--gap-cap", "nan"], "gap cap must be 0 s or more"),
        (["--pin-ttl", "-1"], "--pin-ttl must be between"),
        (["--decode-step-ms", "0"], "decode_step_s must be positive"),
        (["--host-gbps", "0"], "load_bytes_per_s must be positive"),
        (["--max-context", "10"], "--max-context 10 leaves no session"),
        (["--max-requests", "3", "--device-tokens", "64"], "No request of the trace fits in 64"),
        (["--trace", "mooncake", "--hints"], "--hints are about sessions"),
        (["--chart", "x.png"], "--chart writes SVG"),
        (["--chart", "/nowhere/x.svg"], "--chart /nowhere/x.svg can't be written"),
        (["--output", "/nowhere/x.json"], "--output /nowhere/x.json can't be written"),
    ],
)
def test_flags_that_can_not_be(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "kv", *arguments]) == 2
    assert message in capsys.readouterr().err
