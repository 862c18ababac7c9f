"""Steps as graphs bring what steps kernel by kernel bring. Without a GPU, a replay runs what a capture would have recorded."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import msgspec
import pytest
import torch

from headrace.attention.backend import LayerCache, StepMetadata
from headrace.core.request import Request
from headrace.kernels.paged_attention import paged_attention
from headrace.runner.graphs import PROMPT_ROWS, Captured, Shape, StepGraphs
from headrace.runner.runner import ModelRunner

from .harness import Engine, Outcomes, World, model, prompt, request, same, serve, token_bytes
from .test_invariants import FEATURES

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="the kernels of graphs need Triton")

ROWS, PROMPTS = (1, 2, 6), (16, 24)
"""Few and small, since the kernels are interpreted here."""
PLAIN = [msgspec.structs.replace(FEATURES[name], max_tokens=6) for name in ("greedy", "short", "long", "drawn")]


class Immediate(StepGraphs):
    """A replay runs the step itself, on the tensors that a capture would have recorded."""

    replayed: list[Shape]

    def _capture(self, shape: Shape) -> Captured:
        outcome = self._step(shape)

        def replay() -> None:
            self.replayed.append(shape)
            outcome.copy_(self._step(shape))

        return Captured(replay, outcome)


class DeviceAttention:
    """Attention that knows of a step what is on the device, and so knows no bounds from lengths."""

    name = "device"
    capturable = True
    needs_exact_lengths = False

    def plan(self, step: StepMetadata) -> None:
        self._step = step

    def run(self, q: torch.Tensor, cache: LayerCache, sinks: torch.Tensor | None = None) -> torch.Tensor:
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
    graphs.replayed = []
    return made, graphs


def through_graphs(
    world: World, requests: list[Request], monkeypatch: pytest.MonkeyPatch, arriving: bool = False
) -> tuple[Outcomes, list[Shape]]:
    made, graphs = runner(world, monkeypatch)
    engine = Engine(world, made)
    if not arriving:
        engine.add(*requests)
    with torch.inference_mode():
        outcomes = engine.run(arrivals=requests if arriving else ())
    return outcomes, graphs.replayed


def test_launches_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 9 tokens in room for 1 + 16; then 3 rows in room for 6; the prompt that gives logprobs is no graph."""
    world = World()
    made, graphs = runner(world, monkeypatch)
    engine = Engine(world, made)
    engine.add(*[request(f"r{number}", prompt(number, 3), max_tokens=3, ignore_eos=True) for number in range(3)])
    with torch.inference_mode():
        engine.run()
        found = [(result.replayed, result.padding_tokens) for result in engine.results]
        engine.add(msgspec.structs.replace(FEATURES["prompt logprobs"], max_tokens=1))
        engine.run()
    assert found == [(True, shape.tokens - tokens) for shape, tokens in zip(graphs.replayed, (9, 3, 3), strict=True)]
    assert found[1:] == [(True, 3)] * 2
    assert (engine.results[-1].replayed, engine.results[-1].padding_tokens) == (False, 0)


@pytest.mark.parametrize(("family", "depth"), [("llama", 1), ("qwen3", 2)])
def test_features_arriving(family: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts beside decode rows, in chunks; shapes that draw and shapes that leave it to the sampler."""
    world = World(family, max_num_batched_tokens=24, max_num_seqs=6, depth=depth)
    kept = ("long", "drawn", "penalties", "bad words", "min tokens", "logprobs", "prompt logprobs", "samples")
    short = [msgspec.structs.replace(FEATURES[name], max_tokens=5) for name in kept]
    found, shapes = through_graphs(world, short, monkeypatch, arriving=True)
    same(found, serve(World(family), short))
    assert {shape.draws for shape in shapes} == {True, False}
    assert any(shape.decode_rows and shape.prompt_tokens for shape in shapes)


def test_plain_requests_are_drawn_within(monkeypatch: pytest.MonkeyPatch) -> None:
    found, shapes = through_graphs(World(), PLAIN, monkeypatch)
    same(found, serve(World(), PLAIN))
    assert all(shape.draws for shape in shapes)
    assert shapes[-1].prompt_tokens == 0


def test_filters_are_drawn_within(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside rows that have none; a shape without filters serves those that are left when the others have ended."""
    asked: list[dict[str, Any]] = [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1, "top_k": 1}, {"top_k": 20, "top_p": 0.9}, {}]
    requests = [
        request(f"f{number}", prompt(number, 4), max_tokens=6 if not kind else 3, temperature=0.8, seed=number, **kind)
        for number, kind in enumerate(asked)
    ]
    found, shapes = through_graphs(World(), requests, monkeypatch)
    same(found, serve(World(), requests))
    assert all(shape.draws for shape in shapes)
    assert shapes[0].filters and not shapes[-1].filters


def test_a_prompt_that_gives_logprobs_is_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    own = msgspec.structs.replace(FEATURES["prompt logprobs"], max_tokens=3)
    found, shapes = through_graphs(World(), [own], monkeypatch)
    same(found, serve(World(), [own]))
    assert shapes and not any(shape.prompt_tokens for shape in shapes)


def test_preempted_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots and blocks change hands while the rows of a shape stay as many."""
    world = World(num_blocks=12, max_num_seqs=4, depth=2, caching=True)
    requests = [request(f"r{number}", prompt(number, 9), max_tokens=9, ignore_eos=True) for number in range(5)]
    found, _ = through_graphs(world, requests, monkeypatch)
    same(found, serve(World(), requests))


def test_a_broken_row_is_its_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbours get what they would have got, and its blocks are cleared before others have them."""
    made, _ = runner(World(), monkeypatch)
    weights = model("llama").embed_tokens.weight
    poison, token = torch.full_like(weights[5], torch.nan), weights[5].clone()
    fine = request("fine", [7, 8, 9], max_tokens=6, ignore_eos=True)
    try:
        engine = Engine(World(), made)
        weights.data[5] = poison
        engine.add(request("broken", [4, 5, 6], max_tokens=6), fine)
        with torch.inference_mode():
            outcomes = engine.run()
    finally:
        weights.data[5] = token
    assert outcomes["broken"][0].error is not None and outcomes["broken"][0].token_ids == []
    same({"fine": outcomes["fine"]}, serve(World(), [fine]))


def test_shapes_that_are_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than any shape has: kernel by kernel."""
    world = World(max_num_seqs=40, num_blocks=900)
    many = [request(f"r{number}", prompt(number, 3), max_tokens=3, ignore_eos=True) for number in range(PROMPT_ROWS + 2)]
    found, shapes = through_graphs(world, many, monkeypatch)
    same(found, serve(world, many))
    assert not shapes
