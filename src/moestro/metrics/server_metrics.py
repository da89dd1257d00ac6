"""Prometheus metrics of one server: vLLM's names, labels and buckets under `vllm:`, own ones
under `moestro:`.

Every server has a registry of its own, so several live in one process. Nothing is exposed that
is never fed. Names and buckets: vLLM 0.33 (vllm/v1/metrics), so that its dashboards and the load
generators that scrape it work unchanged.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from moestro.metrics.kv_tiers import KVNumbers, KVTierCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FINISH_REASONS = ("stop", "length", "abort", "error")

TIME_TO_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_LATENCY_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_TOKENS_BUCKETS = tuple([1.0] + [float(2**i) for i in range(3, 15)])
PARAMS_N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)


def token_count_buckets(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to the context length."""
    steps = (m * 10**e for e in range(12) for m in (1, 2, 5))
    return tuple(float(s) for s in steps if s <= max(1, max_model_len))


class StepStats(Protocol):
    """What a step tells about the loop (core.messages.EngineStats); counters only grow."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def num_pages_used(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def prefix_queries_tokens(self) -> int: ...
    @property
    def prefix_hits_tokens(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def generation_tokens(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def last_step_tokens(self) -> int: ...
    @property
    def kv(self) -> KVNumbers | None: ...


class PhaseTimes(Protocol):
    """How long an ended request took in the engine (core.outputs.RequestTiming)."""

    @property
    def queue_s(self) -> float: ...
    @property
    def prefill_s(self) -> float | None: ...
    @property
    def decode_s(self) -> float | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """One request as its client saw it. Times in seconds since it arrived.

    finish_reasons: one a sequence. num_generation_tokens: over all n. max_tokens None: up to the
    context limit. first_token_s None: it ended without a token.
    """

    finish_reasons: tuple[str, ...]
    num_prompt_tokens: int
    num_generation_tokens: int
    n: int
    max_tokens: int | None
    e2e_s: float
    first_token_s: float | None
    last_token_s: float | None


_GAUGES = (
    ("num_running", "vllm:num_requests_running", "Requests in model execution batches."),
    ("num_waiting", "vllm:num_requests_waiting", "Requests waiting to be processed."),
    ("num_pages", "moestro:kv_pages", "KV pages of the device pool."),
    ("num_pages_used", "moestro:kv_pages_used", "KV pages held by running requests."),
)
_COUNTERS = (
    ("num_preemptions", "vllm:num_preemptions", "Preemptions from the engine."),
    ("prefix_queries_tokens", "vllm:prefix_cache_queries", "Prefix cache queries, in tokens."),
    ("prefix_hits_tokens", "vllm:prefix_cache_hits", "Prefix cache hits, in tokens."),
    ("prompt_tokens", "vllm:prompt_tokens", "Prefill tokens processed."),
    ("generation_tokens", "vllm:generation_tokens", "Generation tokens processed."),
    ("num_steps", "moestro:engine_steps", "Steps of the engine loop."),
)


class _ExpertTokens(Collector):
    """Tokens by layer and expert: plain sums, made into samples when they are scraped.

    A model with L layers of E experts has at most L E of them; an expert without tokens has none.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._totals: dict[int, list[int]] = {}

    def add(self, rows: Iterable[tuple[int, Sequence[int]]]) -> None:
        for layer, counts in rows:
            before = self._totals.get(layer, [0] * len(counts))
            self._totals[layer] = [a + b for a, b in zip(before, counts, strict=True)]

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "moestro:expert_tokens",
            "Tokens that chose an expert of a layer.",
            labels=[*self._labels, "layer", "expert"],
        )
        for layer, counts in list(self._totals.items()):
            for expert, count in enumerate(counts):
                if count:
                    family.add_metric(
                        [*self._labels.values(), str(layer), str(expert)], float(count)
                    )
        yield family


class ServerMetrics:
    """The metrics of one server. observe_step belongs to one thread, the rest to any.

    As in vLLM, a request's phases are timed in the engine, everything else as its client sees it.
    store_source: what vLLM's label `source` calls the KV store, disk or external_unspecified.
    """

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        cache_config: Mapping[str, object],
        store_source: str = "disk",
    ) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._gauges = {f: self._gauge(name, doc) for f, name, doc in _GAUGES}
        self._kv_usage = self._gauge(
            "vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage."
        )
        self._counters = {f: self._counter(name, doc) for f, name, doc in _COUNTERS}
        self._seen = dict.fromkeys(self._counters, 0)
        success = Counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        self._success = {r: success.labels(*self._labels.values(), r) for r in FINISH_REASONS}
        self._declare_histograms(token_count_buckets(max_model_len))
        self._http = Counter(
            "moestro:http_requests",
            "HTTP requests by route, method and status code.",
            ["route", "method", "code"],
            registry=self.registry,
        )
        self._disconnects = self._counter(
            "moestro:client_disconnects", "Requests aborted because their client went away."
        )
        self._experts = _ExpertTokens(self._labels)
        self.registry.register(self._experts)
        self.kv_tiers = KVTierCollector(self._labels, store_source)
        self.registry.register(self.kv_tiers)
        info = {**{k: str(v) for k, v in cache_config.items()}, "engine": "0"}
        Gauge(
            "vllm:cache_config_info",
            "Information of the cache configuration.",
            list(info),
            registry=self.registry,
        ).labels(**info).set(1)

    def observe_step(self, stats: StepStats) -> None:
        """Take over the loop's gauges and counters after a step."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(stats, name))
        self._kv_usage.set(stats.num_pages_used / stats.num_pages if stats.num_pages else 0.0)
        stepped = stats.num_steps > self._seen["num_steps"]
        for name, counter in self._counters.items():
            value = getattr(stats, name)
            if name == "prefix_hits_tokens" and stats.kv is not None:
                value -= stats.kv.external_hits_tokens  # vLLM counts those apart
            counter.inc(max(0, value - self._seen[name]))
            self._seen[name] = max(value, self._seen[name])
        if stats.kv is not None:
            self.kv_tiers.set(stats.kv)
        if stepped:
            self._iteration_tokens.observe(stats.last_step_tokens)

    def observe_expert_tokens(self, rows: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Add (layer, tokens of each expert) rows; core.step.ExpertTokens gives them."""
        self._experts.add(rows)

    def observe_phases(self, times: PhaseTimes) -> None:
        """Record where one ended request spent its time."""
        self._queue.observe(times.queue_s)
        if times.prefill_s is not None and times.decode_s is not None:
            self._prefill.observe(times.prefill_s)
            self._decode.observe(times.decode_s)
            self._inference.observe(times.prefill_s + times.decode_s)

    def observe_first_token(self, seconds: float) -> None:
        """Time from arrival to the first token of a request."""
        self._ttft.observe(seconds)

    def observe_token_gap(self, seconds: float) -> None:
        """Time between two deliveries of one sequence."""
        self._itl.observe(seconds)

    def observe_finished(self, request: FinishedRequest) -> None:
        """Record one finished request."""
        for reason in request.finish_reasons:
            self._success[reason].inc()
        self._e2e.observe(request.e2e_s)
        self._prompt_tokens.observe(request.num_prompt_tokens)
        self._generation_tokens.observe(request.num_generation_tokens)
        self._params_n.observe(request.n)
        if request.max_tokens is not None:
            self._params_max_tokens.observe(request.max_tokens)
        if request.first_token_s is None or request.last_token_s is None:
            return
        decode_s = request.last_token_s - request.first_token_s
        later_tokens = request.num_generation_tokens - request.n
        if later_tokens > 0:
            # The n sequences of a request decode side by side: time per token of one of them.
            self._tpot.observe(decode_s * request.n / later_tokens)

    def observe_http(self, route: str, method: str, code: int) -> None:
        """Count one HTTP request; `route` is the declared path, so labels stay few."""
        self._http.labels(route, method, str(code)).inc()

    def observe_disconnect(self) -> None:
        """Count a request that was aborted because its client went away."""
        self._disconnects.inc()

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    def _declare_histograms(self, token_counts: tuple[float, ...]) -> None:
        latency = REQUEST_LATENCY_BUCKETS
        histogram = self._histogram
        self._iteration_tokens = histogram(
            "vllm:iteration_tokens_total",
            "Number of tokens per engine step.",
            ITERATION_TOKENS_BUCKETS,
        )
        self._prompt_tokens = histogram(
            "vllm:request_prompt_tokens", "Number of prefill tokens processed.", token_counts
        )
        self._generation_tokens = histogram(
            "vllm:request_generation_tokens", "Number of generation tokens.", token_counts
        )
        self._params_n = histogram(
            "vllm:request_params_n", "The n request parameter.", PARAMS_N_BUCKETS
        )
        self._params_max_tokens = histogram(
            "vllm:request_params_max_tokens", "The max_tokens request parameter.", token_counts
        )
        self._ttft = histogram(
            "vllm:time_to_first_token_seconds",
            "Time to first token in seconds.",
            TIME_TO_FIRST_TOKEN_BUCKETS,
        )
        self._itl = histogram(
            "vllm:inter_token_latency_seconds",
            "Inter-token latency in seconds.",
            TOKEN_LATENCY_BUCKETS,
        )
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Time per output token of a request in seconds.",
            TOKEN_LATENCY_BUCKETS,
        )
        self._e2e = histogram(
            "vllm:e2e_request_latency_seconds", "End-to-end request latency in seconds.", latency
        )
        self._queue, self._prefill, self._decode, self._inference = (
            histogram(
                f"vllm:request_{phase.lower()}_time_seconds",
                f"Time in the {phase} phase of a request.",
                latency,
            )
            for phase in ("QUEUE", "PREFILL", "DECODE", "INFERENCE")
        )

    def _gauge(self, name: str, doc: str) -> Gauge:
        made = Gauge(name, doc, list(self._labels), registry=self.registry)
        return made.labels(**self._labels)

    def _counter(self, name: str, doc: str) -> Counter:
        made = Counter(name, doc, list(self._labels), registry=self.registry)
        return made.labels(**self._labels)

    def _histogram(self, name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(name, doc, list(self._labels), buckets=buckets, registry=self.registry)
        return made.labels(**self._labels)
