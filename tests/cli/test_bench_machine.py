"""`moestro bench machine`: what it reports, and that the figures hang together."""

import json

import pytest
from tests.cli.terminal import main

from moestro.backends.cpu import library, machine
from moestro.cli.bench.machine import measure_machine

pytestmark = pytest.mark.skipif(not library.has_native(), reason="no kernel library was built here")


def test_json_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "machine", "--seconds", "0.05", "--num-threads", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [limits["num_threads"] for limits in told["limits"]] == [1, 2]
    assert told["command"].startswith("moestro bench machine --seconds 0.05")
    assert told["machine"]["num_threads"] >= 1
    for limits in told["limits"]:
        slowest, fastest = limits["read_gbps_range"]
        assert 0 < slowest <= limits["read_gbps"] <= fastest


def test_table_has_a_line_for_each_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "machine", "--seconds", "0.05"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"level {library.status().isa}")
    assert [line.split(",")[0] for line in lines[3:6]] == [
        "fp32 multiply-add",
        "bf16 dot product",
        "int8 dot product",
    ]


@pytest.mark.parametrize("level", library.native().levels() if library.has_native() else ())
def test_only_instructions_that_the_level_has_are_measured(level: str) -> None:
    with library.native().at_level(level):
        for kind in machine.KINDS:
            rates = machine.peak_rates(kind, 0.001, 3)
            if kind != "fp32" and level in ("avx2", "portable"):
                assert rates is None
            else:
                assert rates is not None
                assert all(rate > 0 for rate in rates)


def test_the_number_of_threads_is_given_back() -> None:
    before = library.native().num_threads()
    assert measure_machine(before + 1, 0.02).num_threads == before + 1
    assert library.native().num_threads() == before


def test_a_buffer_is_larger_than_the_cache_and_fits_the_memory() -> None:
    assert machine.read_buffer_bytes(2**40) >= 2**29
    assert machine.read_buffer_bytes(2**30) == 2**28
    assert machine.read_buffer_bytes(0) == 2**24


@pytest.mark.parametrize(
    "arguments", [["--num-threads", "-1"], ["--num-threads", "1025"], ["--seconds", "0"]]
)
def test_bad_values_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "machine", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err
