"""The host tier's share of the memory, its type, and what is refused."""

import re

import pytest
from tests.planner.test_placement import QWEN, TINY, fit, machine, plan

from moestro.errors import CapacityError, ConfigError
from moestro.planner.host_tier import STAGING_BYTES
from moestro.planner.report import plan_lines

PAGE = 98_304 * 64
GIB = 2**30


def test_no_tier_unless_asked_for() -> None:
    made = plan()
    assert (made.num_host_slots, made.host_kv_bytes, made.kv_store) == (0, 0, "none")
    assert not made.host_is_lossy
    assert "tiers" not in "\n".join(plan_lines(made))


def test_a_host_tier_holds_whole_pages_and_counts() -> None:
    made, without = plan(host_kv_bytes="1GiB"), plan()
    assert made.num_host_slots == GIB // PAGE
    assert made.host_kv_bytes == made.num_host_slots * PAGE
    assert made.host_kv_dtype == "bfloat16"
    assert made.keeps_host
    assert not made.host_is_lossy
    assert made.total_bytes == without.total_bytes + made.host_kv_bytes
    assert made.notes == without.notes
    text = "\n".join(plan_lines(made))
    assert "host tier 1.07 GB" in text
    assert f"{made.num_host_slots} host pages of bfloat16, store none" in text


def test_the_host_tier_is_taken_from_what_is_left_for_kv() -> None:
    tight = machine(plan().weight_bytes + plan().buffer_bytes + 3 * GIB)
    with_host = plan(hardware=tight, host_kv_bytes="2GiB")
    assert with_host.kv_cache_bytes <= GIB
    report = fit(hardware=tight, host_kv_bytes="8GiB")
    assert report.shortage is not None
    assert "host tier 8.59 GB (host_kv_bytes)" in report.shortage
    most = int(re.findall(r"host_kv_bytes of at most (\d+)", report.shortage)[0])
    assert plan(hardware=tight, host_kv_bytes=most).num_pages > 0
    with pytest.raises(CapacityError, match="host_kv_bytes"):
        plan(hardware=machine(), host_kv_bytes="1TB")


def test_a_narrower_type_is_said_to_be_lossy() -> None:
    made = plan(host_kv_bytes="1GiB", host_kv_dtype="int8")
    assert made.host_is_lossy
    assert made.num_host_slots == GIB // (50_688 * 64)
    assert any(note.startswith("hit != miss: host KV is int8") for note in made.notes)
    same = plan(host_kv_bytes="1GiB", host_kv_dtype="int8", kv_cache_dtype="int8")
    assert not same.host_is_lossy
    assert same.notes == ()


def test_a_store_alone_has_its_pages_pass_through() -> None:
    made = plan(kv_store="redis://user:secret@box:6379/1")
    assert made.num_host_slots == STAGING_BYTES // PAGE
    assert not made.keeps_host
    assert "host_kv_bytes keeps them" in made.notes[0]
    assert made.kv_store == "redis://***@box:6379/1"
    assert "secret" not in str(made.to_dict())
    assert "42 host pages in passing, store redis://***@box" in "\n".join(plan_lines(made))
    both = plan(kv_store="lmdb:///kv", host_kv_bytes="1GiB")
    assert both.keeps_host


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host_kv_bytes": 1000}, "not even one page of 64 tokens, which takes 6291456 bytes"),
        ({"host_kv_dtype": "int8"}, "needs a host tier"),
        ({"host_kv_bytes": "1GiB", "enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"kv_store": "lmdb:///kv", "enable_prefix_caching": False}, "kv_store keeps pages"),
        (
            {"host_kv_bytes": "1GiB", "kv_cache_dtype": "int8", "host_kv_dtype": "bfloat16"},
            "not narrower than the device's int8",
        ),
        (
            {"host_kv_bytes": "1GiB", "kv_cache_dtype": "int8", "host_kv_dtype": "fp8"},
            "not narrower",
        ),
        (
            {"host_kv_bytes": "1GiB", "host_kv_dtype": "int8", "kv_store": "redis://:pw@h"},
            r"lossy pages never go to a store, but kv_store is 'redis://\*\*\*@h'",
        ),
    ],
)
def test_contradictions_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(TINY if "cache_dtype" in options else QWEN, **options)
