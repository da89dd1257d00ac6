"""Metrics carry vLLM's names, types, labels and buckets, and count right."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moestro.core.messages import EngineStats
from moestro.core.outputs import RequestTiming
from moestro.metrics import FinishedRequest, ServerMetrics
from moestro.metrics.server_metrics import token_count_buckets

# What vLLM 0.33 exposes of each: type, labels beside model_name and engine, and its buckets.
TTFT = [
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
]
TOKEN = [
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
]
REQUEST = [
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
]
STEP = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
UP_TO_3000 = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]

GAUGES = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}
COUNTERS = {
    "vllm:prefix_cache_queries": set(),
    "vllm:prefix_cache_hits": set(),
    "vllm:num_preemptions": set(),
    "vllm:prompt_tokens": set(),
    "vllm:generation_tokens": set(),
    "vllm:request_success": {"finished_reason"},
}
HISTOGRAMS = {
    "vllm:iteration_tokens_total": STEP,
    "vllm:request_prompt_tokens": UP_TO_3000,
    "vllm:request_generation_tokens": UP_TO_3000,
    "vllm:request_params_max_tokens": UP_TO_3000,
    "vllm:request_params_n": [1, 2, 5, 10, 20],
    "vllm:time_to_first_token_seconds": TTFT,
    "vllm:inter_token_latency_seconds": TOKEN,
    "vllm:request_time_per_output_token_seconds": TOKEN,
    "vllm:e2e_request_latency_seconds": REQUEST,
    "vllm:request_queue_time_seconds": REQUEST,
    "vllm:request_prefill_time_seconds": REQUEST,
    "vllm:request_decode_time_seconds": REQUEST,
    "vllm:request_inference_time_seconds": REQUEST,
}
BASE = {"model_name": "m", "engine": "0"}


def make() -> ServerMetrics:
    return ServerMetrics("m", 3000, {"block_size": 64, "num_gpu_blocks": 7})


def families(metrics: ServerMetrics) -> dict[str, object]:
    parsed = text_string_to_metric_families(metrics.render().decode())
    return {family.name: family for family in parsed if not family.name.endswith("_created")}


def value(metrics: ServerMetrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(name, BASE | labels)
    assert found is not None, name
    return found


def test_names_types_and_labels_are_vllms() -> None:
    found = families(make())
    vllm = {name for name in found if name.startswith("vllm:")}
    assert vllm == GAUGES | set(COUNTERS) | set(HISTOGRAMS) | {"vllm:cache_config_info"}
    for name, family in found.items():
        wanted = "counter" if name in COUNTERS else "histogram" if name in HISTOGRAMS else "gauge"
        if name.startswith("vllm:"):
            assert family.type == wanted, name
            extra = COUNTERS.get(name, set()) | ({"le"} if name in HISTOGRAMS else set())
            for sample in family.samples:
                if name != "vllm:cache_config_info" and sample.name.endswith("_bucket"):
                    assert set(sample.labels) == {*BASE, *extra}


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_buckets_are_vllms(name: str) -> None:
    bounds = [
        float(sample.labels["le"])
        for sample in families(make())[name].samples
        if sample.name.endswith("_bucket")
    ]
    assert bounds == [*map(float, HISTOGRAMS[name]), float("inf")]


def test_token_buckets_end_at_the_context() -> None:
    assert token_count_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_count_buckets(262_144)[-1] == 200_000
    assert token_count_buckets(0) == (1,)


def test_steps_move_gauges_and_only_raise_counters() -> None:
    metrics = make()
    first = EngineStats(
        num_running=3,
        num_waiting=2,
        num_pages=8,
        num_pages_used=2,
        num_preemptions=1,
        prefix_queries_tokens=100,
        prefix_hits_tokens=64,
        prompt_tokens=50,
        generation_tokens=7,
        num_steps=1,
        last_step_tokens=9,
    )
    metrics.observe_step(first)
    metrics.observe_step(first)  # a report without a step in between
    metrics.observe_step(EngineStats(num_pages=8, num_steps=2, generation_tokens=9))
    assert value(metrics, "vllm:num_requests_running") == 0
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0
    assert value(metrics, "vllm:prefix_cache_queries_total") == 100
    assert value(metrics, "vllm:prefix_cache_hits_total") == 64
    assert value(metrics, "vllm:num_preemptions_total") == 1
    assert value(metrics, "vllm:prompt_tokens_total") == 50
    assert value(metrics, "vllm:generation_tokens_total") == 9
    assert value(metrics, "vllm:iteration_tokens_total_count") == 2
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 9
    metrics.observe_step(first)
    assert value(metrics, "vllm:num_requests_running") == 3
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    assert value(metrics, "moestro:kv_pages_used") == 2


def finished(**changes: object) -> FinishedRequest:
    fields: dict[str, object] = {
        "finish_reasons": ("stop",),
        "num_prompt_tokens": 10,
        "num_generation_tokens": 5,
        "n": 1,
        "max_tokens": 20,
        "e2e_s": 2.0,
        "first_token_s": 0.5,
        "last_token_s": 1.5,
    }
    return FinishedRequest(**fields | changes)  # type: ignore[arg-type]


def test_finished_requests() -> None:
    metrics = make()
    metrics.observe_finished(finished())
    metrics.observe_finished(
        finished(finish_reasons=("length", "stop"), n=2, num_generation_tokens=12, max_tokens=None)
    )
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 2
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 0
    assert value(metrics, "vllm:request_params_max_tokens_count") == 1
    assert value(metrics, "vllm:request_prompt_tokens_sum") == 20
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum") == 4
    # 1 s over 4 later tokens, and 1 s over 5 later tokens of each of two sequences
    assert value(metrics, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.45)


def test_requests_without_a_token_have_no_token_times() -> None:
    metrics = make()
    metrics.observe_finished(
        finished(
            finish_reasons=("abort",),
            num_generation_tokens=0,
            first_token_s=None,
            last_token_s=None,
        )
    )
    metrics.observe_finished(finished(num_generation_tokens=1, last_token_s=0.5))
    assert value(metrics, "vllm:request_time_per_output_token_seconds_count") == 0
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 2


def test_phases_of_a_request() -> None:
    metrics = make()
    metrics.observe_phases(RequestTiming(queue_s=0.5, prefill_s=1.0, decode_s=3.0))
    metrics.observe_phases(RequestTiming(queue_s=0.25, prefill_s=None, decode_s=None))
    sums = {
        phase: value(metrics, f"vllm:request_{phase}_time_seconds_sum")
        for phase in ("queue", "prefill", "decode", "inference")
    }
    assert sums == {"queue": 0.75, "prefill": 1.0, "decode": 3.0, "inference": 4.0}
    assert value(metrics, "vllm:request_inference_time_seconds_count") == 1


def test_servers_do_not_share_metrics() -> None:
    one, other = make(), make()
    one.observe_disconnect()
    assert value(one, "moestro:client_disconnects_total") == 1
    assert value(other, "moestro:client_disconnects_total") == 0


def test_cache_config() -> None:
    labels = {"block_size": "64", "num_gpu_blocks": "7", "engine": "0"}
    assert make().registry.get_sample_value("vllm:cache_config_info", labels) == 1


def test_expert_tokens_are_summed_by_layer_and_expert() -> None:
    metrics = make()
    assert not families(metrics)["moestro:expert_tokens"].samples
    metrics.observe_expert_tokens([(1, [3, 0]), (2, [0, 4])])
    metrics.observe_expert_tokens([(1, [2, 0])])
    assert value(metrics, "moestro:expert_tokens_total", layer="1", expert="0") == 5
    assert value(metrics, "moestro:expert_tokens_total", layer="2", expert="1") == 4
    assert len(families(metrics)["moestro:expert_tokens"].samples) == 2
