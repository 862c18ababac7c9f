"""Prometheus metrics: the engine's counters as last reported, and request times."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from headrace.metrics.compat import VLLMNames
from headrace.metrics.stats import COUNTERS, GAUGES, LABELLED_COUNTERS, LABELLED_GAUGES, EngineStats, MetricsCompat
from headrace.options import options
from headrace.outputs import OutputDelta, RequestTimes

CONTENT_TYPE = CONTENT_TYPE_LATEST

_LATENCY = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_COUNTS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
_FAMILIES: tuple[tuple[_Family, dict[str, str]], ...] = ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS))
_LABELLED = (GaugeMetricFamily, LABELLED_GAUGES), (CounterMetricFamily, LABELLED_COUNTERS)
_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})


class EngineCollector(Collector):
    """Exports EngineStats at each scrape. Counters restart at 0 with the engine."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        fields = options(EngineStats)
        for family, names in _FAMILIES:
            for field, name in names.items():
                yield family(name, fields[field].help, value=getattr(stats, field))
        usage = "Fraction of the KV blocks owned by sequences, 0 to 1, at the engine's last report."
        yield GaugeMetricFamily("headrace_kv_cache_usage_ratio", usage, value=stats.kv_usage)
        for family, several in _LABELLED:
            for field, (name, labels) in several.items():
                labelled = family(name, fields[field].help, labels=labels)
                for key, count in getattr(stats, field).items():
                    labelled.add_metric(key.split(" ", len(labels) - 1), count)
                yield labelled


class ReplicaReport(NamedTuple):
    """State of one replica that the metrics show."""

    up: bool
    stats: EngineStats
    accepted: int
    """Requests that it has accepted."""
    expected_hit_tokens: int
    true_hit_tokens: int
    wrong_hit_tokens: int


class ReplicaCollector(Collector):
    """Exports the EngineStats of each replica with the label ``replica``, under separate names: the names without it are
    the sums. Counters restart at 0 with the replica, those of routing with the server."""

    def __init__(self, reports: Callable[[], Sequence[ReplicaReport]]) -> None:
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        reports = self._reports()
        fields = options(EngineStats)
        for family, names in _FAMILIES:
            for field, name in names.items():
                yield _by_replica(family, name, fields[field].help, [getattr(one.stats, field) for one in reports])
        usage = "Fraction of the replica's KV blocks owned by sequences, 0 to 1, at its last report."
        yield _by_replica(GaugeMetricFamily, "headrace_kv_cache_usage_ratio", usage, [one.stats.kv_usage for one in reports])
        up = "1 while the replica takes requests, else 0."
        yield _by_replica(GaugeMetricFamily, "headrace_up", up, [float(one.up) for one in reports])
        for field, text in _ROUTING.items():
            yield _by_replica(CounterMetricFamily, f"headrace_{field}", text, [getattr(one, field) for one in reports])


_ROUTING = {
    "accepted": "Requests that the replica accepted.",
    "expected_hit_tokens": "Prompt tokens that the router expected in the replica's prefix cache, counted at the first token.",
    "true_hit_tokens": "Prompt tokens that were in the replica's prefix cache, counted at the first token.",
    "wrong_hit_tokens": "Differences between expected and true hits in tokens, added up.",
}


def _by_replica(family: _Family, name: str, text: str, values: Sequence[float]) -> Metric:
    metric = family(name.replace("headrace_", "headrace_replica_", 1), text, labels=["replica"])
    for replica, value in enumerate(values):
        metric.add_metric([str(replica)], value)
    return metric


class WeightsCollector(Collector):
    """Exports the state of weights that trainers change."""

    def __init__(self, states: Sequence[str], weights: Callable[[], tuple[str, int]]) -> None:
        """
        Args:
            states: all of them.
            weights: returns the state that they are in, and the number of their version.
        """
        self._states, self._weights = states, weights

    def collect(self) -> Iterator[Metric]:
        state, number = self._weights()
        text = "1 for the state that the weights are in, else 0, at the engine's last report."
        states = GaugeMetricFamily("headrace_weights_state", text, labels=["state"])
        for one in self._states:
            states.add_metric([one], float(one == state))
        yield states
        text = "Number of the version of the weights, which rises with each update, at the engine's last report."
        yield GaugeMetricFamily("headrace_weights_version", text, value=number)


class Gaps(Collector):
    """A histogram of the seconds between tokens. It is observed for every token: ``Histogram`` would take a lock twice each
    time and try the buckets in turn."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._counts = [0] * (len(_TOKEN) + 1)
        self._sum = 0.0
        self._created = time.time()

    def observe(self, seconds: float, tokens: int) -> None:
        """``tokens`` that came ``seconds`` after those before them, which they share equally."""
        self._counts[bisect_left(_TOKEN, seconds / tokens)] += tokens
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(floatToGoString, _TOKEN), "+Inf"]
        buckets = list(zip(bounds, map(float, itertools.accumulate(self._counts)), strict=True))
        family = HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)
        family.add_sample(f"{self._name}_created", {}, self._created)
        yield family


class HttpMetrics:
    """Metrics of a server's HTTP requests, in ``registry``, and of its process."""

    def __init__(self, version: str) -> None:
        self.registry = CollectorRegistry()
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self.http = Counter(
            "headrace_http_requests",
            "HTTP requests, by route, method and status, counted when the response ends.",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self.in_flight = Gauge("headrace_http_requests_in_flight", "HTTP requests in progress.", registry=self.registry)
        info = "Always 1; the label has the version of headrace."
        Gauge("headrace_build_info", info, ["version"], registry=self._process).labels(version).set(1)
        self.outcomes = Counter(
            "headrace_requests",
            "Generation requests that ended, by endpoint and outcome.",
            ["endpoint", "outcome"],
            registry=self.registry,
        )

    def observe_http(self, route: str, method: str, status: int) -> None:
        """``route`` is the route's pattern, never the client's path: labels must stay few."""
        self.http.labels(route, method if method in _METHODS else "other", str(status)).inc()

    def render(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return b"".join(generate_latest(collector) for collector in (*self._collectors(), self._process))

    def _collectors(self) -> Sequence[Collector]:
        return [self.registry]


class ServerMetrics(HttpMetrics):
    """The metrics of one model's server. ``stats`` returns the engine's latest statistics.

    ``compat``: whose names the metrics get too; ``model_name`` returns the model's, for their label, or None while it loads.
    ``replicas`` returns the report of each replica; None: there is one engine. ``max_loras``: adapters that run at once.
    """

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        version: str,
        compat: MetricsCompat | None = None,
        model_name: Callable[[], str | None] = lambda: None,
        replicas: Callable[[], Sequence[ReplicaReport]] | None = None,
        max_loras: int = 0,
    ) -> None:
        super().__init__(version)
        registry = self.registry
        self.compat = CollectorRegistry()
        """Metrics under other names."""
        if compat is not None:
            self.compat.register(VLLMNames(registry, model_name, max_loras))
        registry.register(EngineCollector(stats))
        if replicas is not None:
            registry.register(ReplicaCollector(replicas))

        def histogram(name: str, text: str, buckets: Sequence[float] = _LATENCY, unit: str = "_seconds") -> Histogram:
            return Histogram(
                f"headrace_{name}{unit}", f"{text}, observed when a sequence finishes.", buckets=buckets, registry=registry
            )

        self.time_to_first_token = histogram("time_to_first_token", "Seconds from a request's arrival to its first token")
        self.inter_token = Gaps(
            "headrace_inter_token_latency_seconds",
            "Seconds between tokens of one sequence, observed as they reach the server.",
        )
        registry.register(self.inter_token)
        self.end_to_end = histogram("request_latency", "Seconds from a request's arrival to its last token")
        self.queue_time = histogram("queue_time", "Seconds from a request's arrival to its first step")
        self.prefill = histogram("prefill", "Seconds from a request's first step to its first token")
        self.decode = histogram("decode", "Seconds from a request's first token to its last")
        self.time_per_token = histogram(
            "request_time_per_output_token", "Mean seconds between the tokens of a sequence of two or more", _TOKEN
        )
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a sequence", _COUNTS, "")
        self.generation_tokens = histogram("request_generation_tokens", "Output tokens of a sequence", _COUNTS, "")
        self.attention_density = histogram(
            "request_attention_density",
            "Share of dense attention's blocks that a prompt which attends sparsely attends to",
            _SHARES,
            "",
        )
        self.reasoning_tokens = Counter(
            "headrace_reasoning_tokens", "Output tokens that were parsed as reasoning.", registry=registry
        )
        self.tool_calls = Counter(
            "headrace_tool_calls",
            "Tool calls that answers began, by the format that the model writes them in.",
            ["format"],
            registry=registry,
        )

    def observe_finished(self, times: RequestTimes, prompt_tokens: int, generation_tokens: int) -> None:
        """Observes the latencies and the lengths of a finished sequence."""
        self.prompt_tokens.observe(prompt_tokens)
        self.generation_tokens.observe(generation_tokens)
        if times.scheduled is not None:
            self.queue_time.observe(max(0.0, times.scheduled - times.arrived))
        if times.first_token is not None:
            self.time_to_first_token.observe(max(0.0, times.first_token - times.arrived))
            if times.scheduled is not None:
                self.prefill.observe(max(0.0, times.first_token - times.scheduled))
        if times.finished is not None:
            self.end_to_end.observe(max(0.0, times.finished - times.arrived))
            if times.first_token is not None:
                self.decode.observe(decode := max(0.0, times.finished - times.first_token))
                if generation_tokens > 1:
                    self.time_per_token.observe(decode / (generation_tokens - 1))

    def _collectors(self) -> Sequence[Collector]:
        return [self.registry, self.compat]


class GenerationObserver:
    """Observes the deltas of one HTTP request."""

    def __init__(self, metrics: ServerMetrics, prompt_tokens: Sequence[int], tool_format: str = "none") -> None:
        """
        Args:
            prompt_tokens: the length of each of its prompts.
            tool_format: of the model's tool calls.
        """
        self._metrics = metrics
        self._tool_format = tool_format
        self._prompt_tokens = prompt_tokens
        self._seen: dict[tuple[int, int], tuple[int, float]] = {}
        """(prompt, sample) -> its tokens so far, and the arrival of the last one."""

    def delta(self, prompt: int, delta: OutputDelta) -> None:
        """Observes one delta. Several tokens of one share the time since the previous one equally."""
        key = (prompt, delta.index)
        generated, last = self._seen.get(key, (0, 0.0))
        if tokens := len(delta.token_ids):
            now = time.monotonic()
            if generated:
                self._metrics.inter_token.observe(now - last, tokens)
            generated += tokens
            self._seen[key] = generated, now
        for event in delta.events:
            if event.tokens:
                self._metrics.reasoning_tokens.inc(event.tokens)
            if event.kind == "call_started":
                self._metrics.tool_calls.labels(self._tool_format).inc()
        if delta.attention is not None and delta.attention.density is not None and delta.index == 0:
            self._metrics.attention_density.observe(delta.attention.density)
        if delta.times is not None:
            self._metrics.observe_finished(delta.times, self._prompt_tokens[prompt], generated)
