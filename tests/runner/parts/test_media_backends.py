"""Prompts with pictures through the backends of GPUs: interpreted or imitated on a CPU, and on a GPU themselves."""

from __future__ import annotations

import importlib.util
from typing import Any

import msgspec
import pytest
import torch
from support.fake_flashinfer import Device, flashinfer, wait_for_kernels
from support.runner.harness import (
    MEDIA_IN_FP8,
    SPECS,
    WITH_MEDIA,
    Encoder,
    Engine,
    Outcomes,
    World,
    alone,
    model,
    same,
    serve,
    token_bytes,
)

from headrace.attention import select
from headrace.attention.compose import WithVisibleEnds, usual_of
from headrace.core.request import Request
from headrace.runner.runner import ModelRunner
from runner.parts.test_media_invariants import finished, quick, requests, shuffled

__all__ = ["flashinfer"]
triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="the kernels need Triton")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
KINDS = [*WITH_MEDIA, *MEDIA_IN_FP8]


def short(family: str, *names: str) -> list[Request]:
    return [msgspec.structs.replace(each, max_tokens=3) for each in requests(family) if each.request_id in names]


@triton
@pytest.mark.parametrize("family", quick(WITH_MEDIA, "both ways"))
def test_the_kernel_of_gpus_sees_what_items_see(family: str) -> None:
    """Interpreted, with two prompts of pictures in a step, chunks, and steps behind them."""
    two = short(family, "two", "last")
    world = World(family, backend="triton", max_num_batched_tokens=28)
    same(serve(world, two), alone(World(family, backend="reference"), two))


@triton
@pytest.mark.parametrize("family", quick(MEDIA_IN_FP8, "both ways, KV in FP8"))
def test_the_kernel_of_gpus_sees_them_in_a_cache_in_fp8(family: str) -> None:
    """It multiplies stored numbers in another order of rounding than the reference."""
    one = short(family, "last")
    ((found,),) = serve(World(family, backend="triton", max_num_batched_tokens=20), one).values()
    ((expected,),) = alone(World(family, backend="reference"), one).values()
    assert found.token_ids == expected.token_ids
    pairs = zip(found.prompt_logprobs or [], expected.prompt_logprobs or [], strict=True)
    prompt = [(a.logprobs[0], b.logprobs[0]) for a, b in pairs if a is not None and b is not None]
    assert len(prompt) > 20 and all(abs(a - b) < 0.05 for a, b in prompt)


def flashinfer_engine(world: World) -> tuple[Engine, list[Any]]:
    """Layers of FlashInfer's, with another backend for what it cannot see, as ``select.create_for`` combines them."""
    spec = SPECS[world.family]
    both = spec.vision is not None and spec.vision.bidirectional
    backends: list[Any] = []
    for layer in spec.layers:
        wait_for_kernels("flashinfer", layer)
        usual = select.create("flashinfer")
        backends.append(WithVisibleEnds(usual, select.create("reference")) if both else usual)
    made = ModelRunner(model(world.family), world.config(), token_bytes(), backends=backends, encoder=Encoder(world.device))
    return Engine(world, made), backends


@pytest.mark.parametrize("family", WITH_MEDIA)
def test_flashinfer_runs_prompts_with_pictures(family: str, flashinfer: Device) -> None:
    """Prompts come in chunks and are preempted; steps in which tokens see later ones are another backend's, all others its
    own."""
    world = World(family, max_num_batched_tokens=25, num_blocks=30, depth=2, caching=True)
    engine, backends = flashinfer_engine(world)
    few = [msgspec.structs.replace(each, max_tokens=4) for each in shuffled(family, 1)]
    engine.add(*few)
    planned: list[bool] = []
    for backend in backends:
        usual = usual_of(backend)
        plan = usual.plan

        def noted(step: Any, plan: Any = plan) -> None:
            planned.append(step.visible_ends is not None)
            plan(step)

        usual.plan = noted
    with torch.inference_mode():
        found = engine.run()
    same(found, alone(World(family), few))
    assert planned and not any(planned)
    finished(engine)


TIGHT: dict[str, Any] = {"depth": 2, "num_blocks": 22, "max_num_batched_tokens": 24, "caching": True}


def whole(outcomes: Outcomes) -> Outcomes:
    assert all(outcome.error is None and outcome.token_ids for samples in outcomes.values() for outcome in samples)
    return outcomes


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("family", [pytest.param(name, marks=gpu) for name in KINDS])
def test_on_a_gpu_company_chunks_and_preemption_change_nothing(family: str, backend: str) -> None:
    world = World(family, device="cuda", backend=backend)
    expected = whole(alone(world, requests(family)))
    found = serve(World(family, device="cuda", backend=backend, **TIGHT), shuffled(family, 2))
    if family in MEDIA_IN_FP8:  # A rounding may tip a stored number.
        assert whole(found).keys() == expected.keys()
    else:
        same(found, expected)


@pytest.mark.parametrize("family", [pytest.param(name, marks=gpu) for name in WITH_MEDIA])
def test_a_gpu_comes_to_what_a_cpu_comes_to(family: str) -> None:
    """Greedily: a sampled token is another where rounding tips it."""
    greedy = [each for each in requests(family) if each.sampling.greedy]
    same(serve(World(family, device="cuda", backend="triton"), greedy), serve(World(family), greedy))
