"""`moestro doctor` and `moestro ops`."""

import json
import socket
from pathlib import Path

import pytest
from tests.cli.terminal import main, moestro

from moestro import envs
from moestro.backends.cpu import library
from moestro.cli import doctor

NAMES = [
    "python",
    "libraries",
    "kernels",
    "cpu",
    "speed",
    "memory",
    "cache",
    "bundled model",
    "port",
    "environment",
]


def findings(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, object]]:
    main(["doctor", "--json", *arguments])
    return {f["name"]: f for f in json.loads(capsys.readouterr().out)["findings"]}


def test_doctor_looks_at_everything(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--cache-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[6:].split("  ")[0].strip() for line in lines] == NAMES
    found = findings(capsys, "--cache-dir", str(tmp_path))
    assert list(found) == NAMES
    assert found["bundled model"]["state"] == "ok"
    assert found["bundled model"]["files_checked"] == 5
    assert str(found["kernels"]["identity"]).startswith("cpu-")
    assert int(str(found["cpu"]["num_threads"])) >= 1
    assert found["cache"]["path"] == str(tmp_path)


def test_variables_that_are_set(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in envs.ALL:
        monkeypatch.delenv(variable.name, raising=False)
    arguments = ("--cache-dir", str(tmp_path))
    assert findings(capsys, *arguments)["environment"]["text"] == "no MOESTRO_ variable is set"
    monkeypatch.setenv("MOESTRO_CACHE_DIR", str(tmp_path))
    found = findings(capsys, *arguments)["environment"]
    assert found["text"] == f"MOESTRO_CACHE_DIR={tmp_path}"


def test_a_misspelt_variable_is_a_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESTRO_CACHEDIR", "/x")
    found = findings(capsys, "--cache-dir", str(tmp_path))["environment"]
    assert (found["state"], found["unknown"]) == ("warning", ["MOESTRO_CACHEDIR"])


def test_reference_bodies_are_a_warning() -> None:
    done = moestro("doctor", env={"MOESTRO_CPU_ISA": "reference"})
    assert done.returncode == 0
    line = next(text for text in done.stdout.splitlines() if "kernels" in text)
    assert line.startswith(" warn kernels")
    assert "reference bodies serve" in line
    assert "speed          not measured" in done.stdout


@pytest.mark.skipif(not library.has_native(), reason="no kernel library was built here")
def test_doctor_measures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = findings(capsys, "--cache-dir", str(tmp_path))["speed"]
    assert found["level"] == library.status().isa
    assert float(str(found["read_gbps"])) > 0
    assert float(str(found["fp32_gflops"])) > 0


def test_a_port_in_use_is_a_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moestro.config import ServerConfig

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(
            "moestro.config.ServerConfig", lambda: ServerConfig.from_kwargs(port=port)
        )
        finding = findings(capsys)["port"]
    assert (finding["state"], finding["free"]) == ("warning", False)


def test_a_damaged_model_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "SHA256SUMS").write_text("0" * 64 + "  config.json\n")
    monkeypatch.setattr("moestro.weights.source.resolve_model", lambda _: tmp_path)
    assert main(["doctor"]) == 1
    assert "ERROR bundled model  damaged: tiny-hy3/config.json" in capsys.readouterr().out


def test_a_check_that_breaks_is_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> doctor.Finding:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(doctor, "_kernels", broken)
    assert main(["doctor"]) == 1
    assert "ERROR kernels        RuntimeError: no such thing" in capsys.readouterr().out


def test_ops_name_their_bodies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--json"]) == 0
    served = {op["op"]: op for op in json.loads(capsys.readouterr().out)}
    assert {"rms_norm", "paged_attention", "moe_experts", "sample_tokens"} <= set(served)
    assert all(op["bodies"] for op in served.values())
    assert {"device", "body", "conditional", "invariant"} == set(served["rms_norm"]["bodies"][0])
    assert main(["ops"]) == 0
    table, _, legend = capsys.readouterr().out.partition("\n\n")
    assert len(table.splitlines()) == len(served)
    assert ("? serves" in legend) == ("?" in table)
    assert ("~ may give" in legend) == ("~" in table)
