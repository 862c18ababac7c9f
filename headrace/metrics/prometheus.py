"""Prometheus metrics: the engine's counters as they stand at a scrape, and the times of requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

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

from headrace.metrics.stats import EngineStats
from headrace.outputs import OutputDelta, RequestTimes

CONTENT_TYPE = CONTENT_TYPE_LATEST

_LATENCY = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})

_GAUGES = {
    "num_running": ("headrace_requests_running", "Sequences that take part in the engine's steps."),
    "num_waiting": ("headrace_requests_waiting", "Sequences that wait for a place."),
    "kv_blocks_used": ("headrace_kv_blocks_used", "KV blocks owned by sequences."),
    "kv_blocks_total": ("headrace_kv_blocks", "KV blocks there are."),
    "kv_usage": ("headrace_kv_cache_usage_ratio", "Share of the KV blocks owned by sequences, 0 to 1."),
}
_COUNTERS = {
    "step": ("headrace_engine_steps", "Steps the engine has run."),
    "num_preemptions": ("headrace_preemptions", "Sequences that gave their blocks back to be computed again."),
    "kv_blocks_moved": ("headrace_kv_blocks_moved", "KV blocks copied to make room for another cache group."),
    "prefix_query_tokens": ("headrace_prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache."),
    "prefix_hit_tokens": ("headrace_prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache."),
    "prompt_tokens": ("headrace_prompt_tokens", "Prompt tokens of requests that have started."),
    "computed_prompt_tokens": ("headrace_computed_prompt_tokens", "Prompt tokens that were computed, not found."),
    "generation_tokens": ("headrace_generation_tokens", "Tokens generated."),
    "forward_seconds": ("headrace_engine_forward_seconds", "Time in the model's forward pass."),
    "sample_seconds": ("headrace_engine_sample_seconds", "Time in the sampler."),
    "replayed_steps": ("headrace_engine_replayed_steps", "Steps whose model ran as a CUDA graph."),
    "eager_steps": ("headrace_engine_eager_steps", "Steps whose model ran kernel by kernel."),
    "padding_tokens": ("headrace_padding_tokens", "Tokens of nobody's, computed to fill up CUDA graphs."),
    "host_seconds": ("headrace_engine_host_seconds", "Time of steps outside forward pass and sampler."),
}


class EngineCollector(Collector):
    """Reads EngineStats when Prometheus asks. Its counters start again at 0 when the engine restarts, as counters may."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, value=getattr(stats, field))
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(stats, field))
        finished = CounterMetricFamily("headrace_sequences_finished", "Sequences that ended, by reason.", labels=["reason"])
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished


class ServerMetrics:
    """The metrics of one server, in a registry of its own. ``stats`` tells the engine's counters as of now."""

    def __init__(self, stats: Callable[[], EngineStats], version: str) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(EngineCollector(stats))
        ProcessCollector(registry=registry)
        self.time_to_first_token = Histogram(
            "headrace_time_to_first_token_seconds", "From arrival to the first token.", buckets=_LATENCY, registry=registry
        )
        self.inter_token = Histogram(
            "headrace_inter_token_latency_seconds",
            "Between tokens of one sequence, as they reach the server.",
            buckets=_TOKEN,
            registry=registry,
        )
        self.end_to_end = Histogram(
            "headrace_request_latency_seconds", "From arrival to the last token.", buckets=_LATENCY, registry=registry
        )
        self.queue_time = Histogram(
            "headrace_queue_time_seconds", "From arrival to the first step.", buckets=_LATENCY, registry=registry
        )
        self.outcomes = Counter(
            "headrace_requests", "Generation requests, by how they ended.", ["endpoint", "outcome"], registry=registry
        )
        self.http = Counter("headrace_http_requests", "HTTP requests.", ["route", "method", "status"], registry=registry)
        self.in_flight = Gauge("headrace_http_requests_in_flight", "HTTP requests being answered.", registry=registry)
        info = Gauge("headrace_build_info", "Always 1.", ["version"], registry=registry)
        info.labels(version).set(1)

    def observe_http(self, route: str, method: str, status: int) -> None:
        """``route`` is the route's pattern, never the client's path: labels must stay few."""
        self.http.labels(route, method if method in _METHODS else "other", str(status)).inc()

    def observe_generation(self) -> GenerationObserver:
        return GenerationObserver(self)

    def observe_times(self, times: RequestTimes) -> None:
        """The life of one finished sequence."""
        if times.scheduled is not None:
            self.queue_time.observe(max(0.0, times.scheduled - times.arrived))
        if times.first_token is not None:
            self.time_to_first_token.observe(max(0.0, times.first_token - times.arrived))
        if times.finished is not None:
            self.end_to_end.observe(max(0.0, times.finished - times.arrived))

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


class GenerationObserver:
    """Watches the deltas of one request."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._last: dict[tuple[int, int], float] = {}
        """(prompt, sample) -> when its last token came."""

    def delta(self, prompt: int, delta: OutputDelta) -> None:
        """A step may bring several tokens: each is taken to have cost its share of the wait."""
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
