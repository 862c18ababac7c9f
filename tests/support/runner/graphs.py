"""Graphs of steps on a CPU: they run what they would have captured."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from headrace.attention.backend import AttentionBackend, AttentionInputs, StepMetadata
from headrace.kernels.attention.reference import paged_attention
from headrace.runner.graphs import Captured, SampleShape, Shape, StepGraphs
from headrace.runner.runner import ModelRunner
from support.runner.harness import World, model, token_bytes

ROWS, PROMPTS = (1, 2, 6), (16, 24)
"""Few and small, since the kernels are interpreted here."""


class Immediate(StepGraphs):
    """A replay runs the step itself, on the tensors that a capture would have recorded."""

    models: list[Shape]
    draws: list[SampleShape]
    """What has been replayed."""

    def _compile(self, shape: Shape | SampleShape) -> None: ...

    def _capture(self, shape: Shape | SampleShape) -> Captured:
        def replay() -> None:
            (self.models if isinstance(shape, Shape) else self.draws).append(shape)
            self._run(shape)

        return Captured(replay)


class DeviceAttention(AttentionBackend):
    """Attention that knows of a step what is on the device, and so knows no bounds from lengths."""

    name = "device"
    capturable = True

    @staticmethod
    def supports(spec: Any, device: str, dtype: str, kv_dtype: Any = None, modes: Any = frozenset()) -> list[str]:
        return []

    def plan(self, step: StepMetadata) -> None:
        self._step = step

    def run(self, inputs: AttentionInputs) -> torch.Tensor:
        q, cache, sinks, *_ = inputs
        step, spec = self._step, cache.spec
        limits = {"scale": spec.scale, "window": spec.window, "soft_cap": spec.soft_cap, "sinks": sinks}
        tables = step.block_tables[cache.group]
        out = paged_attention(q, cache.keys, cache.values, tables, step.query_start, step.seq_lens, **limits)
        return out.flatten(1)


def runner(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[ModelRunner, Immediate]:
    monkeypatch.setattr("headrace.runner.runner.StepGraphs", Immediate)
    config = dataclasses.replace(world.config(), graph_rows=ROWS, graph_prompt_tokens=PROMPTS)
    backends: list[Any] = [DeviceAttention()] * config.model.num_layers
    made = ModelRunner(model(world.family), config, token_bytes(), backends=backends)
    graphs = made._graphs
    assert isinstance(graphs, Immediate)
    graphs.models, graphs.draws = [], []
    count = made.capture_next()
    for captured in range(count.captured + 1, count.total + 1):
        assert made.capture_next() == (captured, count.total, "")
    assert made.capture_next() == (count.total, count.total, "")
    return made, graphs
