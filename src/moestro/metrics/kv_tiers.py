"""What /metrics says of the KV tiers: the engine's own totals, made into samples when scraped.

vllm: names are those of vLLM 0.32 (vllm/v1/metrics/loggers.py), whose sources add up to
prefix_cache_hits + external_prefix_cache_hits; the rest is moestro:. A tier that is off has no
samples.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

BREAKER_STATES = ("closed", "half_open", "open")


class TierNumbers(Protocol):
    """One tier (core.kv_stats.TierStats)."""

    @property
    def tier(self) -> str: ...
    @property
    def hits_tokens(self) -> int: ...


class HintNumbers(Protocol):
    """Answers to one kind of hint (core.kv_stats.HintCounts)."""

    @property
    def action(self) -> str: ...
    @property
    def num_accepted(self) -> int: ...
    @property
    def num_refused(self) -> int: ...
    @property
    def accepted_tokens(self) -> int: ...
    @property
    def clipped_tokens(self) -> int: ...
    @property
    def requested_tokens(self) -> int: ...


class MoverNumbers(Protocol):
    """What moves pages (core.page_moves.MoverState)."""

    @property
    def num_queued_bytes(self) -> int: ...
    @property
    def breaker(self) -> str: ...
    @property
    def num_quarantined(self) -> int: ...
    @property
    def failures(self) -> tuple[tuple[str, int], ...]: ...


class KVNumbers(Protocol):
    """All tiers that are on (core.kv_stats.KVTierStats)."""

    @property
    def tiers(self) -> Sequence[TierNumbers]: ...
    @property
    def external_queries_tokens(self) -> int: ...
    @property
    def external_hits_tokens(self) -> int: ...
    @property
    def recomputed_tokens(self) -> int: ...
    @property
    def num_pins(self) -> int: ...
    @property
    def num_sessions(self) -> int: ...
    @property
    def hints(self) -> Sequence[HintNumbers]: ...
    @property
    def mover(self) -> MoverNumbers | None: ...


_ALL, _LOWER = ("device", "host", "store"), ("host", "store")
_TierRow = tuple[str, str, str, tuple[str, ...]]
"""Field, name, help, and the tiers that it says something of."""
_TIER_GAUGES: tuple[_TierRow, ...] = (
    ("bytes_used", "kv_tier_used_bytes", "Bytes of cached and held KV pages.", _ALL),
    ("capacity_bytes", "kv_tier_capacity_bytes", "Byte budget of a KV tier.", _ALL),
    ("pinned_bytes", "kv_tier_pinned_bytes", "Bytes that pins cover.", ("device",)),
)
_TIER_COUNTERS: tuple[_TierRow, ...] = (
    ("num_promoted", "kv_tier_promoted_pages", "Pages that came up from a tier.", _LOWER),
    ("num_demoted", "kv_tier_demoted_pages", "Pages that sank to a tier.", _LOWER),
    (
        "num_evicted",
        "kv_tier_evicted_pages",
        "Pages that left a tier to make room, as far as this engine made them.",
        _ALL,
    ),
    ("load_bytes", "kv_tier_load_bytes", "Bytes read from a tier to the one above.", _LOWER),
    ("load_s", "kv_tier_load_seconds", "Time that reading from a tier took.", _LOWER),
)


class KVTierCollector(Collector):
    """Samples of the newest numbers. store_source: how vLLM calls what the store is."""

    def __init__(self, labels: Mapping[str, str], store_source: str) -> None:
        self._names = list(labels)
        self._values = list(labels.values())
        self._sources = {"store": store_source}
        self._numbers: KVNumbers | None = None
        self._event_counts: Callable[[], tuple[int, int]] | None = None

    def set(self, numbers: KVNumbers) -> None:
        """What the next scrape shows. From any thread."""
        self._numbers = numbers

    def watch_events(self, counts: Callable[[], tuple[int, int]]) -> None:
        """counts: batches of KV events published and dropped so far."""
        self._event_counts = counts

    def collect(self) -> Iterator[Metric]:
        """One family after the other."""
        numbers = self._numbers
        if numbers is not None:
            yield from self._of_tiers(numbers)
            yield from self._of_hints(numbers)
            if numbers.mover is not None:
                yield from self._below_the_device(numbers, numbers.mover)
        if self._event_counts is not None:
            published, dropped = self._event_counts()
            yield self._counter(
                "moestro:kv_event_batches",
                "Batches of KV events published, and dropped because too many were waiting.",
                [((("outcome", "published"),), published), ((("outcome", "dropped"),), dropped)],
            )

    def _of_tiers(self, numbers: KVNumbers) -> Iterator[Metric]:
        tiers = numbers.tiers
        yield self._counter(
            "vllm:prompt_tokens_cached_by_source",
            "Prefix-cache hit tokens by the cache tier that supplied them.",
            [((("source", self._sources.get(t.tier, t.tier)),), t.hits_tokens) for t in tiers],
        )
        yield self._counter(
            "vllm:prompt_tokens_cached",
            "Number of cached prompt tokens (local + external).",
            [((), sum(t.hits_tokens for t in tiers))],
        )
        for field, name, doc, of_tiers in _TIER_GAUGES:
            family = GaugeMetricFamily(f"moestro:{name}", doc, labels=[*self._names, "tier"])
            for tier in tiers:
                if tier.tier in of_tiers:
                    family.add_metric([*self._values, str(tier.tier)], getattr(tier, field))
            yield family
        for field, name, doc, of_tiers in _TIER_COUNTERS:
            told = [t for t in tiers if t.tier in of_tiers]
            rows = [((("tier", str(t.tier)),), getattr(t, field)) for t in told]
            yield self._counter(f"moestro:{name}", doc, rows)

    def _of_hints(self, numbers: KVNumbers) -> Iterator[Metric]:
        yield self._gauge("moestro:kv_pins", "Pins in force.", numbers.num_pins)
        yield self._gauge("moestro:kv_sessions", "Sessions known by name.", numbers.num_sessions)
        answers, tokens = [], []
        for counts in numbers.hints:
            of_action = ("action", str(counts.action))
            answers += [
                ((of_action, ("outcome", "accepted")), counts.num_accepted),
                ((of_action, ("outcome", "refused")), counts.num_refused),
            ]
            tokens += [
                ((of_action, ("outcome", "accepted")), counts.accepted_tokens),
                ((of_action, ("outcome", "clipped")), counts.clipped_tokens),
                ((of_action, ("outcome", "requested")), counts.requested_tokens),
            ]
        yield self._counter("moestro:kv_hints", "Hints about cached KV, as answered.", answers)
        yield self._counter("moestro:kv_hint_tokens", "Tokens of hints, as answered.", tokens)

    def _below_the_device(self, numbers: KVNumbers, mover: MoverNumbers) -> Iterator[Metric]:
        yield self._counter(
            "vllm:external_prefix_cache_queries",
            "External prefix cache queries, in terms of number of queried tokens.",
            [((), numbers.external_queries_tokens)],
        )
        yield self._counter(
            "vllm:external_prefix_cache_hits",
            "External prefix cache hits, in terms of number of cached tokens.",
            [((), numbers.external_hits_tokens)],
        )
        yield self._counter(
            "moestro:kv_recomputed_tokens",
            "Prompt tokens found below the device and computed because that was faster.",
            [((), numbers.recomputed_tokens)],
        )
        yield self._gauge(
            "moestro:kv_queued_bytes", "Bytes of moves that wait.", mover.num_queued_bytes
        )
        if mover.breaker == "none":
            return
        yield self._counter(
            "moestro:kv_store_failures",
            "Calls of the KV store that failed, by kind.",
            [((("kind", str(kind)),), count) for kind, count in mover.failures],
        )
        yield self._counter(
            "moestro:kv_store_quarantined_pages",
            "Pages that failed a check when read, and were taken out.",
            [((), mover.num_quarantined)],
        )
        state = GaugeMetricFamily(
            "moestro:kv_store_breaker",
            "1 for the state that the KV store's circuit breaker is in.",
            labels=[*self._names, "state"],
        )
        for name in BREAKER_STATES:
            state.add_metric([*self._values, name], float(mover.breaker == name))
        yield state

    def _counter(
        self, name: str, doc: str, rows: Sequence[tuple[tuple[tuple[str, str], ...], float]]
    ) -> CounterMetricFamily:
        """rows: (further labels, total), all with the same further labels."""
        more = [label for label, _ in rows[0][0]] if rows else []
        family = CounterMetricFamily(name, doc, labels=[*self._names, *more])
        for labels, total in rows:
            family.add_metric([*self._values, *(value for _, value in labels)], float(total))
        return family

    def _gauge(self, name: str, doc: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, doc, labels=self._names)
        family.add_metric(self._values, value)
        return family
