"""Sparse prompts by the kernels of GPUs, interpreted here, and beside steps that are captured as graphs."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch
from support.runner.harness import Engine, alone, prompt, request, same
from support.runner.sparse_world import SparseWorld, captured_runner, model

from headrace.attention import sparse
from headrace.attention.backend import StepMetadata, distinct
from headrace.attention.context import ForwardContext
from headrace.core.request import Request
from headrace.kernels import gpu, support
from headrace.models.capture import no_host_sync
from headrace.models.interface import ModelInputs
from headrace.runner.build import make_backends, make_caches
from headrace.runner.largest import largest_step
from runner.parts.test_sparse import EXACT, MODES, expected, run, traffic

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="the kernels need Triton")


def few() -> list[Request]:
    """Interpreted kernels take their time."""
    return [
        request("sparse", prompt(70, 150), max_tokens=3, logprobs=2),
        request("dense", prompt(71, 40), max_tokens=3, logprobs=2, sparse_prefill=False),
        request("short", prompt(72, 70), max_tokens=3, logprobs=2),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("mode", EXACT)
def test_the_kernels_of_gpus_say_the_same(mode: str, copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the cache itself, and over copies of keys and values."""
    monkeypatch.setattr(sparse, "loads_tiles", lambda q: copies)
    monkeypatch.setattr("headrace.attention.paged_rows._COPY_QUERIES", 1)
    wanted = alone(MODES[mode], few())
    monkeypatch.setattr(gpu, "takes", lambda x: True)
    same(run(dataclasses.replace(MODES[mode], backend="triton"), few())[1], wanted)


def test_steps_with_sparse_rows_are_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without any are, in the same engine."""
    world = MODES["elastic"]
    requests = [request(f"r{i}", prompt(80 + i, 70), max_tokens=4) for i in range(2)]
    wanted = alone(MODES["elastic"], requests)
    engine = Engine(world, captured_runner(world, (1, 2), monkeypatch))
    engine.add(*requests)
    with torch.inference_mode():
        same(engine.run(), wanted)
    assert [result.replayed for result in engine.results] == [False, True, True, True]


@pytest.mark.parametrize(("mode", "most", "lengths"), [("elastic", 400, [400]), ("xattn", 0, [1024])])
def test_memory_is_measured_with_the_largest_step(mode: str, most: int, lengths: list[int]) -> None:
    """The longest prompt that a router sees as a whole has such a step to itself."""
    world = dataclasses.replace(MODES[mode], max_exact_tokens=most, max_num_batched_tokens=300 if most else 1024)
    config = world.config()
    step, positions = largest_step(config)
    assert step.query_counts.tolist() == lengths and len(positions) == config.scheduler.most_tokens
    assert step.sparse is not None and step.sparse.first == 0
    assert (step.sparse.routed is not None) == (mode == "elastic")
    model(world.spec)(ModelInputs(torch.zeros_like(positions), positions), context(world, step))
    assert int(step.sparse.kept.min()) > 0
    dense = dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, sparse=None))
    assert largest_step(dense)[0].sparse is None and dense.scheduler.most_tokens == dense.scheduler.max_num_batched_tokens


def context(world: SparseWorld, step: StepMetadata) -> ForwardContext:
    config = world.config()
    backends = make_backends(config)
    for backend in distinct(backends):
        backend.plan(step)
    return ForwardContext(step, make_caches(config), backends)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("mode", EXACT)
def test_a_gpu_says_the_same_and_its_layers_do_not_wait(mode: str, copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if copies and (support.compute_capability("cuda") or 0) < sparse.TENSOR_MEMORY:
        pytest.skip("needs a GPU with a tensor memory unit")
    monkeypatch.setattr(sparse, "loads_tiles", lambda q: copies)
    monkeypatch.setattr("headrace.attention.paged_rows._COPY_QUERIES", 1)
    world = dataclasses.replace(MODES[mode], backend="triton", device="cuda", depth=2, caching=True)
    engine = Engine(world)
    engine.add(*traffic())
    same(engine.run(), expected(mode))
    # Its kernels are compiled now: compiling waits, as does making a longer table of angles.
    other = Engine(world)
    decoder: Any = other.runner._forward._model
    for table in decoder.rotary._tables:
        table.reserve(world.config().scheduler.max_model_len)
    forward = decoder.forward

    def watched(*args: object) -> torch.Tensor:
        with no_host_sync():
            return forward(*args)

    monkeypatch.setattr(decoder, "forward", watched)
    other.add(*traffic())
    same(other.run(), expected(mode))
