"""write_back: nothing sinks before it has to, and what has sunk gives what computing gives."""

from pathlib import Path

import pytest
from tests.e2e.tiered import PAGE_SIZE, ask, prefix_of, settle, start
from tests.e2e.workload import NEEDS_KERNELS, signature

pytestmark = NEEDS_KERNELS

PROMPT = [3 + 11 * i % 257 for i in range(6 * PAGE_SIZE + 5)]


@pytest.mark.parametrize("tier", ["host", "store"])
def test_what_is_written_back_on_eviction_is_hit_below(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # reading a page of this model takes longer than computing it
    monkeypatch.setattr("moestro.kvcache.fetcher.should_load", lambda *_: True)
    with start("tiny-hy3", enable_prefix_caching=False) as llm:
        computed = signature(ask(llm, PROMPT))
    options = {
        "max_model_len": 128,
        "kv_cache_memory_bytes": 100 * 40960,
        "host_kv_bytes": 40_000_000,
        "kv_store": f"lmdb://{tmp_path / 'kv'}",
        "kv_store_bytes": "1GiB",
        "cache_dir": str(tmp_path / "cache"),
        "kv_write_policy": "write_back",
    }
    with start("tiny-hy3", **options) as llm:
        ask(llm, PROMPT)
        settle(llm)
        device, *below = llm.stats().kv.tiers
        assert device.bytes_used
        assert all(t.bytes_used == 0 for t in below)  # nothing sinks before it has to
        for i in range(20):  # 7 pages each, less than write_back keeps clean
            ask(llm, [7 + (i * 31 + j * j) % 250 for j in range(100)])
            settle(llm)
        if tier == "host":
            output = ask(llm, PROMPT)
            assert signature(output) == computed
            assert prefix_of(output).host_tokens == 6 * PAGE_SIZE
    if tier == "store":
        with start("tiny-hy3", **options) as llm:
            output = ask(llm, PROMPT)
            assert signature(output) == computed
            assert prefix_of(output).store_tokens == 6 * PAGE_SIZE
