"""Prometheus metrics: the engine's counters as last reported, and request times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.metrics.stats import COUNTERS, GAUGES, LABELLED_COUNTERS, EngineStats
from headrace.options import options
from headrace.outputs import OutputDelta, RequestTimes

CONTENT_TYPE = CONTENT_TYPE_LATEST

_LATENCY = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})


class EngineCollector(Collector):
    """Exports EngineStats at each scrape. Counters restart at 0 with the engine."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        fields = options(EngineStats)
        for field, name in GAUGES.items():
            yield GaugeMetricFamily(name, fields[field].help, value=getattr(stats, field))
        for field, name in COUNTERS.items():
            yield CounterMetricFamily(name, fields[field].help, value=getattr(stats, field))
        usage = "Fraction of the KV blocks owned by sequences, 0 to 1, at the engine's last report."
        yield GaugeMetricFamily("headrace_kv_cache_usage_ratio", usage, value=stats.kv_usage)
        for field, (name, labels) in LABELLED_COUNTERS.items():
            family = CounterMetricFamily(name, fields[field].help, labels=labels)
            for key, count in getattr(stats, field).items():
                family.add_metric(key.split(), count)
            yield family


class ServerMetrics:
    """The metrics of one server, in their own registry. ``stats`` returns the engine's latest statistics."""

    def __init__(self, stats: Callable[[], EngineStats], version: str) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(EngineCollector(stats))
        ProcessCollector(registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float] = _LATENCY) -> Histogram:
            return Histogram(f"headrace_{name}_seconds", text, buckets=buckets, registry=registry)

        self.time_to_first_token = histogram(
            "time_to_first_token", "Seconds from a request's arrival to its first token, observed when a sequence finishes."
        )
        self.inter_token = histogram(
            "inter_token_latency", "Seconds between tokens of one sequence, observed as they reach the server.", _TOKEN
        )
        self.end_to_end = histogram(
            "request_latency", "Seconds from a request's arrival to its last token, observed when a sequence finishes."
        )
        self.queue_time = histogram(
            "queue_time", "Seconds from a request's arrival to its first step, observed when a sequence finishes."
        )
        self.outcomes = Counter(
            "headrace_requests",
            "Generation requests that ended, by endpoint and outcome.",
            ["endpoint", "outcome"],
            registry=registry,
        )
        self.http = Counter(
            "headrace_http_requests",
            "HTTP requests, by route, method and status, counted when the response ends.",
            ["route", "method", "status"],
            registry=registry,
        )
        self.in_flight = Gauge("headrace_http_requests_in_flight", "HTTP requests in progress.", registry=registry)
        info = Gauge("headrace_build_info", "Always 1; the label has the version of headrace.", ["version"], registry=registry)
        info.labels(version).set(1)

    def observe_http(self, route: str, method: str, status: int) -> None:
        """``route`` is the route's pattern, never the client's path: labels must stay few."""
        self.http.labels(route, method if method in _METHODS else "other", str(status)).inc()

    def observe_times(self, times: RequestTimes) -> None:
        """Observes the latencies of a finished sequence."""
        if times.scheduled is not None:
            self.queue_time.observe(max(0.0, times.scheduled - times.arrived))
        if times.first_token is not None:
            self.time_to_first_token.observe(max(0.0, times.first_token - times.arrived))
        if times.finished is not None:
            self.end_to_end.observe(max(0.0, times.finished - times.arrived))

    def render(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class GenerationObserver:
    """Observes the deltas of one request."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._last: dict[tuple[int, int], float] = {}
        """(prompt, sample) -> arrival of its last token."""

    def delta(self, prompt: int, delta: OutputDelta) -> None:
        """Observes one delta. Several tokens of one step share the time since the previous delta equally."""
        if delta.token_ids:
            now, key = time.monotonic(), (prompt, delta.index)
            last = self._last.get(key)
            self._last[key] = now
            if last is not None:
                share = (now - last) / len(delta.token_ids)
                for _ in delta.token_ids:
                    self._metrics.inter_token.observe(share)
        if delta.times is not None:
            self._metrics.observe_times(delta.times)
