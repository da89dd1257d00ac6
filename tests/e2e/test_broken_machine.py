"""Engines on a machine that breaks: their store is deleted, their clocks jump, they are killed, or
five of them open one store. Always the tokens that computing gives, and nothing that hangs."""

import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.cli.terminal import main
from tests.e2e.tiered import PAGE_SIZE, ask, prefix_of, settle, start, transfer_of
from tests.e2e.workload import NEEDS_KERNELS, Signature, signature
from tests.kvstore.small_disk import small_disk

pytestmark = NEEDS_KERNELS

ROOT = Path(__file__).parents[2]
PROMPT = [3 + 11 * i % 257 for i in range(6 * PAGE_SIZE + 5)]
OTHER = [5 + 7 * i % 251 for i in range(6 * PAGE_SIZE + 5)]


@pytest.fixture(autouse=True)
def always_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a page of this model takes longer than computing it."""
    monkeypatch.setattr("moestro.kvcache.fetcher.should_load", lambda *_: True)


@pytest.fixture(scope="module")
def computed() -> list[Signature]:
    with start("tiny-hy3", enable_prefix_caching=False) as llm:
        return [signature(ask(llm, prompt)) for prompt in (PROMPT, OTHER)]


def options(folder: Path) -> dict[str, Any]:
    """Of an engine with a store in a folder."""
    cache = str(folder.parent / "cache")
    return {"kv_store": f"lmdb://{folder}", "kv_store_bytes": "64MiB", "cache_dir": cache}


def test_five_engines_open_one_store(tmp_path: Path, computed: list[Signature]) -> None:
    with ExitStack() as stack:
        engines = [
            stack.enter_context(start("tiny-hy3", **options(tmp_path / "kv"))) for _ in range(5)
        ]
        for i, llm in enumerate(engines):
            output = ask(llm, PROMPT)
            assert signature(output) == computed[0]
            assert (prefix_of(output).store_tokens > 0) == (i > 0)
            settle(llm)


def test_the_store_is_deleted_while_the_engine_runs(
    tmp_path: Path, computed: list[Signature], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moestro.kvstore.threaded.MAINTAIN_EVERY_S", 0.01)
    with start("tiny-hy3", **options(tmp_path / "kv")) as llm:
        assert signature(ask(llm, PROMPT)) == computed[0]
        settle(llm)
        shutil.rmtree(tmp_path / "kv")
        deadline = time.monotonic() + 30
        while "unavailable" not in dict(transfer_of(llm).state().failures):
            assert time.monotonic() < deadline
            assert signature(ask(llm, OTHER)) == computed[1]
            ask(llm, [9 + time.monotonic_ns() % 200, *PROMPT])
            settle(llm)
        assert signature(ask(llm, PROMPT)) == computed[0]
    assert not (tmp_path / "kv").exists()
    with start("tiny-hy3", **options(tmp_path / "kv")) as llm:
        assert signature(ask(llm, PROMPT)) == computed[0]


def test_the_disk_is_full_before_and_while_the_engine_runs(
    tmp_path: Path, computed: list[Signature]
) -> None:
    with small_disk(tmp_path / "disk", "size=1m"):
        full = options(tmp_path / "disk" / "kv") | {"cache_dir": str(tmp_path / "cache")}
        with start("tiny-hy3", **full) as llm:
            for i in range(6):
                ask(llm, [7 + (i * 31 + j * j) % 250 for j in range(300)])
            settle(llm)
            assert signature(ask(llm, PROMPT)) == computed[0]
            state = transfer_of(llm).state()
            assert dict(state.failures).get("full", 0) or state.store_bytes < 2**20
        (tmp_path / "disk" / "rest").write_bytes(b"")
        with start("tiny-hy3", **full) as llm:
            assert signature(ask(llm, PROMPT)) == computed[0]


def test_clocks_that_jump(
    tmp_path: Path, computed: list[Signature], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall clock by years, both ways; the monotonic one as after a long sleep, and back."""
    wall, steady = time.time, time.monotonic
    offset = 0.0
    with start("tiny-hy3", **options(tmp_path / "kv"), host_kv_bytes=2_000_000) as llm:
        monkeypatch.setattr(time, "time", lambda: wall() + 1000 * offset)
        monkeypatch.setattr(time, "monotonic", lambda: steady() + offset)
        for jump in (0.0, 1e6, -1e5, 3e6, 0.0):
            offset = jump
            began = steady()
            assert signature(ask(llm, PROMPT)) == computed[0]
            assert signature(ask(llm, OTHER)) == computed[1]
            assert steady() - began < 30
        settle(llm)
        monkeypatch.undo()
        assert signature(ask(llm, PROMPT)) == computed[0]


WRITER = """
import sys
from tests.e2e.tiered import start, ask, settle
from pathlib import Path
with start("tiny-hy3", kv_store=sys.argv[1], kv_store_bytes="64MiB", cache_dir=sys.argv[2]) as llm:
    for i in range(10_000):
        ask(llm, [7 + (i * 31 + j * j) % 250 for j in range(200)])
        print(i, flush=True)
"""


def test_an_engine_killed_while_it_writes_leaves_pages_that_verify(
    tmp_path: Path, computed: list[Signature], capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"lmdb://{tmp_path}/kv"
    writer = [sys.executable, "-c", WRITER, url, str(tmp_path / "cache")]
    with subprocess.Popen(writer, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(8):
            assert process.stdout.readline()
        process.kill()
    assert main(["kv", "verify", url]) == 0
    assert " 0 corrupt" in capsys.readouterr().out
    with start("tiny-hy3", **options(tmp_path / "kv")) as llm:
        assert signature(ask(llm, PROMPT)) == computed[0]
        assert transfer_of(llm).state().failures == ()
