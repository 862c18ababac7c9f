"""Steps as graphs whose attention is FlashInfer's: planned before each replay, they bring what other steps bring.

Without a GPU, its wrappers compute as the formula says (``attention.fake_flashinfer``), and a replay runs what a capture
would have recorded.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import msgspec
import pytest
import torch
from support.fake_flashinfer import Device, flashinfer, wait_for_kernels
from support.runner.features import FEATURES
from support.runner.harness import Engine, World, model, prompt, request, same, serve, token_bytes

from headrace.attention import select
from headrace.runner.graphs import Captured, SampleShape, Shape, StepGraphs
from headrace.runner.runner import ModelRunner

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="the kernels of graphs need Triton")
__all__ = ["flashinfer"]

ROWS, PROMPTS = (1, 2, 6), (16, 24)


class Recorded(StepGraphs):
    """A first run, a capture, and replays that run the step as it was captured."""

    device_of_test: Device
    captured: list[Shape]

    def _compile(self, shape: Shape | SampleShape) -> None:
        self._pad(shape)
        self._run(shape)

    def _capture(self, shape: Shape | SampleShape) -> Captured:
        if isinstance(shape, SampleShape):
            return Captured(lambda: self._run(shape))
        device = self.device_of_test
        self.captured.append(shape)
        with device.capture() as tape:
            self._run(shape)

        def replay() -> None:
            with device.replay(tape):
                self._run(shape)

        return Captured(replay)


def capture(runner: ModelRunner, graphs: int = 1000) -> None:
    made = runner.capture_next()
    while made.captured < min(graphs, made.total):
        made = runner.capture_next()


def engine(world: World, device: Device, monkeypatch: pytest.MonkeyPatch, graphs: int = 1000) -> tuple[Engine, list[Shape]]:
    kind: Any = type("RecordedHere", (Recorded,), {"device_of_test": device, "captured": []})
    monkeypatch.setattr("headrace.runner.runner.StepGraphs", kind)
    config = dataclasses.replace(world.config(), graph_rows=ROWS, graph_prompt_tokens=PROMPTS)
    backends: list[Any] = [select.create("flashinfer")] * config.model.num_layers
    made = ModelRunner(model(world.family), config, token_bytes(), backends=backends)
    capture(made, graphs)
    return Engine(world, made), kind.captured


def ready(world: World) -> None:
    for spec in world.config().model.layers:
        wait_for_kernels("flashinfer", spec)


@pytest.mark.parametrize(
    ("family", "depth"),
    [
        pytest.param("llama", 1, marks=pytest.mark.slow),
        ("qwen3", 2),
        ("windows between", 2),
        ("uneven", 2),
        ("three sizes", 1),
    ],
)
def test_features_arriving(family: str, depth: int, flashinfer: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts beside decode rows, in chunks; K and V of other widths, windows, several cache groups."""
    world = World(family, max_num_batched_tokens=24, max_num_seqs=6, depth=depth)
    ready(world)
    kept = ("long", "drawn", "penalties", "logprobs", "prompt logprobs", "samples")
    short = [msgspec.structs.replace(FEATURES[name], max_tokens=4) for name in kept]
    made, captured = engine(world, flashinfer, monkeypatch)
    with torch.inference_mode():
        found = made.run(arrivals=short)
    same(found, serve(World(family), short))
    assert any(shape.decode_rows and shape.prompt_tokens for shape in captured)
    assert len(captured) == len(set(captured)), "nothing is captured twice"
    assert any(result.replayed for result in made.results) and any(not result.replayed for result in made.results)


def test_preempted_sequences(flashinfer: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots and blocks change hands while the rows of a shape stay as many."""
    world = World(num_blocks=12, max_num_seqs=4, depth=2, caching=True)
    ready(world)
    requests = [request(f"r{number}", prompt(number, 9), max_tokens=9, ignore_eos=True) for number in range(5)]
    made, _ = engine(world, flashinfer, monkeypatch)
    made.add(*requests)
    with torch.inference_mode():
        found = made.run()
    same(found, serve(World(), requests))


def test_steps_captured_before_the_kernels_were_there(flashinfer: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernel is in them; when FlashInfer's is ready they are captured again, once, and nothing else changes."""
    flashinfer.allowed.clear()
    world = World(depth=2)
    requests = [request(f"r{number}", prompt(number, 5), max_tokens=12, ignore_eos=True) for number in range(2)]
    made, captured = engine(world, flashinfer, monkeypatch, 4)
    made.add(*requests)
    steps = 0

    def ready_in_time(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 6:
            assert not flashinfer.plans
            flashinfer.allowed.set()
            ready(world)
            capture(made.runner, 4)

    with torch.inference_mode():
        found = made.run(before_step=ready_in_time)
    same(found, serve(World(), requests))
    decode = Shape(6, 0)
    assert captured.count(decode) == 2 and flashinfer.plans
