"""What is planned, what fits, and what the refusals say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.config import EngineConfig
from moestro.core.hardware import HardwareSpec
from moestro.core.model_config import parse_model_config
from moestro.core.model_spec import ModelSpec
from moestro.core.plan import Plan
from moestro.errors import CapacityError, ConfigError, UnsupportedError
from moestro.planner.placement import FitReport, fit_plan, make_plan
from moestro.planner.report import plan_lines

GIB = 2**30
DATA = Path(__file__).parents[1] / "core/data"


def spec(name: str = "hub_qwen3_30b_a3b", **changes: Any) -> ModelSpec:
    return parse_model_config(json.loads((DATA / f"{name}.json").read_text()) | changes)


QWEN = spec()
TINY = spec("hf_hy_v3_tiny_saved")


def machine(available: int = 128 * GIB, memory: int | None = None) -> HardwareSpec:
    return HardwareSpec("cpu", "test", memory or available, available, 8, "avx2")


def plan(model: ModelSpec = QWEN, hardware: HardwareSpec | None = None, **options: Any) -> Plan:
    return make_plan("m", model, hardware or machine(), EngineConfig.from_kwargs(**options))


def fit(model: ModelSpec = QWEN, hardware: HardwareSpec | None = None, **options: Any) -> FitReport:
    return fit_plan("m", model, hardware or machine(), EngineConfig.from_kwargs(**options))


def test_defaults_on_a_large_machine() -> None:
    made = plan()
    assert (made.dtype, made.kv_cache_dtype, made.device) == ("bfloat16", "bfloat16", "cpu")
    assert made.kv_bytes_per_token == 98_304
    page = 98_304 * 64
    assert made.num_pages == 4 * GIB // page
    assert made.kv_cache_bytes == made.num_pages * page <= 4 * GIB
    assert made.max_context_tokens == made.num_pages * 64
    assert made.num_threads == 8
    # 40,960 positions fit into 4 GiB of this model's KV once
    assert (made.max_model_len, made.max_full_sequences) == (40_960, 1)
    assert made.notes == ()


def test_default_kv_is_a_quarter_of_what_the_weights_leave() -> None:
    weights = plan().weight_bytes
    made = plan(hardware=machine(weights + 8 * GIB), max_model_len=1024)
    assert 2 * GIB - 98_304 * 64 < made.kv_cache_bytes <= 2 * GIB


def test_unset_length_is_clipped_to_the_kv_memory() -> None:
    made = plan(kv_cache_memory_bytes=10**9)
    assert made.max_model_len == made.max_context_tokens == 10**9 // (98_304 * 64) * 64
    assert made.max_full_sequences == 1
    assert "kv_cache_memory_bytes" in made.notes[0]
    needed = int(re.findall(r"kv_cache_memory_bytes of (\d+)", made.notes[0])[0])
    assert plan(kv_cache_memory_bytes=needed).max_model_len == 40_960


def test_a_length_that_was_asked_for_gets_more_than_the_default() -> None:
    long = spec(max_position_embeddings=262144)
    made = plan(long, max_model_len=100_000)
    assert made.max_model_len == 100_000
    assert made.kv_cache_bytes == -(-100_000 // 64) * 64 * 98_304 > 4 * GIB
    assert made.max_full_sequences == 1


def test_a_length_that_does_not_fit_is_refused_with_what_fits() -> None:
    with pytest.raises(CapacityError) as caught:
        plan(kv_cache_memory_bytes=10**9, max_model_len=20_000)
    message = str(caught.value)
    assert "max_model_len=20000" in message
    assert "1.97 GB" in message  # what one sequence needs
    up_to = int(re.findall(r"kv_cache_memory_bytes up to (\d+)", message)[0])
    made = plan(kv_cache_memory_bytes=up_to, max_model_len=20_000)
    sequences = int(re.findall(r"or (\d+) sequences of 20000", message)[0])
    assert sequences == made.max_full_sequences > 1


def test_kv_memory_beyond_the_machine_is_refused_with_what_fits() -> None:
    hardware = machine(plan().weight_bytes + 8 * GIB)
    with pytest.raises(CapacityError, match=r"KV memory 100\.0 GB") as caught:
        plan(hardware=hardware, kv_cache_memory_bytes="100GB")
    up_to = int(re.findall(r"kv_cache_memory_bytes up to (\d+)", str(caught.value))[0])
    assert plan(hardware=hardware, kv_cache_memory_bytes=up_to).kv_cache_bytes == up_to


def test_weights_beyond_the_machine() -> None:
    with pytest.raises(CapacityError, match=r"does not fit: weights 590\.2 GB"):
        plan(spec("hub_hy3"), machine(24 * GIB))
    report = fit(spec("hub_hy3"), machine(24 * GIB))
    assert not report.fits
    assert report.missing_bytes > 560 * 10**9
    assert (report.plan.num_pages, report.plan.max_context_tokens) == (0, 0)
    assert report.plan.max_full_sequences == report.largest_context_tokens == 0
    assert fit(spec("hub_hy3"), machine(report.missing_bytes + 24 * GIB)).shortage is None


def test_buffers_are_named_when_they_are_what_is_too_large() -> None:
    with pytest.raises(CapacityError, match="smaller max_num_batched_tokens or max_num_seqs"):
        plan(TINY, machine(2 * 10**8), max_num_batched_tokens=2**20, max_num_seqs=2**16)


def test_share_of_the_memory() -> None:
    hardware = machine(120 * GIB, memory=128 * GIB)
    half = fit(hardware=hardware, gpu_memory_utilization=0.9)
    total = half.plan.total_bytes
    page = 98_304 * 64
    assert int(0.9 * 128 * GIB) - page < total <= int(0.9 * 128 * GIB)
    # an explicit KV size wins over the share
    both = plan(hardware=hardware, gpu_memory_utilization=0.9, kv_cache_memory_bytes="5GB")
    assert both.kv_cache_bytes <= 5 * 10**9
    # memory that others hold is not ours
    rest = plan(hardware=machine(100 * GIB, memory=128 * GIB), gpu_memory_utilization=0.9)
    assert rest.total_bytes <= 100 * GIB
    assert "are free" in rest.notes[0]


def test_types() -> None:
    made = plan(dtype="float32", max_model_len=4096)
    assert (made.dtype, made.kv_cache_dtype) == ("float32", "float32")
    assert made.kv_bytes_per_token == 2 * 98_304
    assert "checkpoint is bfloat16" in made.notes[0]
    made = plan(TINY)  # a float32 checkpoint computes in bfloat16 unless told otherwise
    assert made.dtype == "bfloat16"
    assert "checkpoint is float32" in made.notes[0]
    assert plan(TINY, dtype="float32").notes == ()
    assert plan(kv_cache_dtype="bfloat16").kv_cache_dtype == "bfloat16"
    assert plan(dtype="float32", kv_cache_dtype="bfloat16").kv_bytes_per_token == 98_304


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_kv_counts_its_scales(kv_cache_dtype: str, dtype: str) -> None:
    made = plan(dtype=dtype, kv_cache_dtype=kv_cache_dtype, kv_hadamard=True, max_model_len=4096)
    assert (made.kv_cache_dtype, made.kv_hadamard) == (kv_cache_dtype, True)
    # 48 layers of 4 heads, keys and values: 128 codes and a scale
    assert made.kv_bytes_per_token == 2 * 48 * 4 * (128 + 4)
    assert f"{kv_cache_dtype}, keys rotated" in "\n".join(plan_lines(made))


def test_a_rotation_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='auto' keeps them in bfloat16"):
        plan(kv_hadamard=True)
    odd = spec(head_dim=96)
    with pytest.raises(UnsupportedError, match=r"power of two; m has 96"):
        plan(odd, kv_hadamard=True, kv_cache_dtype="int8")


def test_length_beyond_the_checkpoint() -> None:
    with pytest.raises(ConfigError, match="max_model_len=40961 is beyond the 40960 positions"):
        plan(max_model_len=40_961)


def drafting(method: str, **options: Any) -> EngineConfig:
    return EngineConfig(
        speculative_config={"method": method, "num_speculative_tokens": 2}, **options
    )


@pytest.mark.parametrize("method", ["mtp", "hybrid"])
def test_mtp_layers_count_where_they_draft(method: str) -> None:
    hy3, big = spec("hub_hy3"), machine(10**12)
    made, without = make_plan("m", hy3, big, drafting(method)), plan(hy3, big)
    assert (made.num_mtp_layers, without.num_mtp_layers) == (1, 0)
    assert made.weight_bytes - without.weight_bytes > 2 * 3_752_612_288
    assert (made.kv_bytes_per_token, without.kv_bytes_per_token) == (331_776, 327_680)
    assert made.buffer_bytes > without.buffer_bytes
    int8 = make_plan("m", hy3, big, drafting(method, kv_cache_dtype="int8"))
    assert int8.kv_bytes_per_token == 2 * 81 * 8 * (128 + 4)
    assert int8.kv_cache_bytes == int8.num_pages * int8.page_size * int8.kv_bytes_per_token


def test_lookups_take_nothing() -> None:
    hy3, big = spec("hub_hy3"), machine(10**12)
    made, without = make_plan("m", hy3, big, drafting("ngram")), plan(hy3, big)
    assert made.num_mtp_layers == 0
    assert made.weight_bytes == without.weight_bytes
    assert made.kv_bytes_per_token == without.kv_bytes_per_token
    assert made.buffer_bytes > without.buffer_bytes  # more rows are scored
    assert made.speculation is not None
    assert made.speculation.method == "ngram"
    assert make_plan("m", QWEN, big, drafting("ngram")).speculation == made.speculation


@pytest.mark.parametrize("method", ["mtp", "hybrid"])
def test_a_checkpoint_without_the_layer_can_not_draft_with_it(method: str) -> None:
    with pytest.raises(ConfigError, match=rf"{method}.*m has no MTP layer.*nextn.*Use .*ngram"):
        make_plan("m", QWEN, machine(), drafting(method))
    with pytest.raises(ConfigError, match=r"promises 1, but the files hold none.*ngram"):
        make_plan("m", spec("hub_hy3"), machine(10**12), drafting(method), num_mtp_layers=0)


def test_the_host_tier_holds_mtp_layers_too() -> None:
    hy3, big = spec("hub_hy3"), machine(10**12)
    made = make_plan("m", hy3, big, drafting("mtp", host_kv_bytes=10 * 331_776 * 64 + 1))
    assert made.num_host_slots == 10
    assert made.host_kv_bytes == 10 * 331_776 * 64


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "mtp", "num_speculative_tokens": 0}, "from 1 to 32, got 0"),
        ({"method": "mtp", "num_speculative_tokens": -1}, "from 1 to 32, got -1"),
        ({"method": "mtp", "num_speculative_tokens": 100}, "from 1 to 32, got 100"),
        ({"method": "mtp", "num_speculative_tokens": 2.0}, "whole number"),
        ({"method": "mtp", "num_speculative_tokens": True}, "whole number"),
        ({"method": "mtp"}, "needs num_speculative_tokens"),
        ({"num_speculative_tokens": 2}, "needs a method"),
        ({"method": "eagle3", "num_speculative_tokens": 2}, "mtp, ngram, hybrid, got 'eagle3'"),
        ({"method": ["mtp"], "num_speculative_tokens": 2}, "mtp, ngram, hybrid"),
        ({"method": "mtp", "num_speculative_tokens": 2, "model": "x"}, "no key 'model'"),
        ({"method": "mtp", "num_speculative_tokens": 2, "adaptive": 1}, "true or false"),
        ({"method": "mtp", "num_speculative_tokens": 2, "adaptive": True}, "not available"),
        ({}, "needs a method"),
    ],
)
def test_a_wrong_speculative_config_names_value_and_limit(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        plan(spec("hub_hy3"), machine(10**12), speculative_config=given)
    assert "speculative_config" in str(caught.value)


def test_threads_and_pages_as_asked() -> None:
    made = plan(num_threads=3, page_size=16, max_num_seqs=2, max_num_batched_tokens=1)
    assert (made.num_threads, made.page_size, made.max_num_seqs) == (3, 16, 2)
    assert made.max_num_batched_tokens == 1
    assert made.max_full_sequences <= 2


def test_other_devices_wait() -> None:
    with pytest.raises(UnsupportedError, match="cuda"):
        make_plan("m", QWEN, HardwareSpec("cuda", "x", 1, 1, 1, "sm_90"), EngineConfig())


def test_the_longest_context_ends_with_the_positions() -> None:
    roomy = fit(hardware=machine(1024 * GIB))
    assert roomy.largest_context_tokens == QWEN.max_position_embeddings
    tight = fit(hardware=machine(plan().weight_bytes + 2 * GIB))
    assert 0 < tight.largest_context_tokens < QWEN.max_position_embeddings


def test_report_as_json() -> None:
    report = fit()
    values = json.loads(json.dumps(report.to_dict()))
    assert values["fits"] is True
    assert values["shortage"] is None
    assert values["weight_bytes"] == report.plan.weight_bytes
    assert values["total_bytes"] == report.plan.total_bytes
    assert values["notes"] == []


@given(
    available=st.integers(0, 2**38),
    kv=st.none() | st.integers(1, 2**38),
    length=st.none() | st.integers(1, 40_960),
    page_size=st.sampled_from([1, 16, 64, 4096]),
    share=st.none() | st.floats(0.01, 1.0),
    model=st.sampled_from([QWEN, TINY, spec("hub_hy3")]),
)
def test_a_plan_that_fits_keeps_its_bounds(
    available: int,
    kv: int | None,
    length: int | None,
    page_size: int,
    share: float | None,
    model: ModelSpec,
) -> None:
    config = EngineConfig(
        kv_cache_memory_bytes=kv,
        max_model_len=length,
        page_size=page_size,
        gpu_memory_utilization=share,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )
    report = fit_plan("m", model, machine(available), config)
    made = report.plan
    assert made.kv_cache_bytes == made.num_pages * page_size * made.kv_bytes_per_token
    assert (report.missing_bytes > 0) is (not report.fits)
    if not report.fits:
        assert report.shortage
        return
    assert made.total_bytes <= report.available_bytes <= available
    assert 1 <= made.max_model_len <= made.max_context_tokens
    assert 1 <= made.max_full_sequences <= 4
    if kv is not None:
        assert made.kv_cache_bytes <= kv
    if length is not None:
        assert made.max_model_len == length
