"""Metrics of a server of several models: those of each, with its name in the label ``model_name``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.metrics.prometheus import HttpMetrics, ServerMetrics


class ModelReport(NamedTuple):
    """One model, as the metrics show it."""

    name: str
    metrics: ServerMetrics
    loaded: bool
    nbytes: int
    """Memory that it takes while it is loaded."""
    loads: int
    failed_loads: int


class HostMetrics(HttpMetrics):
    """Metrics of the server, which have no ``model_name``, and of its models."""

    def __init__(self, version: str, models: Callable[[], Sequence[ModelReport]]) -> None:
        super().__init__(version)
        self._models = models

    def _collectors(self) -> Sequence[Collector]:
        models = self._models()
        own = {"": self.registry} | {model.name: model.metrics.registry for model in models}
        return [_ByModel(own), _ByModel({model.name: model.metrics.compat for model in models}), _Loads(models)]


class _ByModel(Collector):
    """Joins families of the same name, whose samples get the model's name unless they have it. "" names none."""

    def __init__(self, sources: Mapping[str, Collector]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        joined: dict[str, Metric] = {}
        for model, source in self._sources.items():
            label = {"model_name": model} if model else {}
            for family in source.collect():
                copy = Metric(family.name, family.documentation, family.type, family.unit)
                samples = (sample._replace(labels=label | sample.labels) for sample in family.samples)
                joined.setdefault(family.name, copy).samples.extend(samples)
        yield from joined.values()


class _Loads(Collector):
    def __init__(self, models: Sequence[ModelReport]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        label = ["model_name"]
        loaded = GaugeMetricFamily("headrace_model_loaded", "1 while the model is loaded, else 0.", labels=label)
        nbytes = GaugeMetricFamily("headrace_model_bytes", "Memory that the model takes while it is loaded.", labels=label)
        loads = CounterMetricFamily("headrace_model_loads", "Times that the model was loaded.", labels=label)
        failed = CounterMetricFamily("headrace_model_failed_loads", "Times that it could not be loaded.", labels=label)
        for model in self._models:
            loaded.add_metric([model.name], float(model.loaded))
            nbytes.add_metric([model.name], float(model.nbytes))
            loads.add_metric([model.name], model.loads)
            failed.add_metric([model.name], model.failed_loads)
        yield from (loaded, nbytes, loads, failed)
