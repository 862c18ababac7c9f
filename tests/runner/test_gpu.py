"""The same runner on a GPU: the invariants hold there, and it draws what the CPU draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.runner.harness import FAMILIES, IN_FP8, Engine, World, alone, same, serve

from headrace.core.plan import NewSequence, pack_tokens
from headrace.sampling.feature import LogitsRows
from headrace.sampling.random import philox
from headrace.sampling.sampler import Sampler
from headrace.sampling_params import SamplingParams

from .test_invariants import REQUESTS, shuffled

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
families = pytest.mark.parametrize("family", FAMILIES)


@families
def test_company_pipelining_and_preemption_change_nothing(family: str) -> None:
    world = World(family, device="cuda", backend="reference")
    expected = alone(world, REQUESTS)
    same(serve(World(family, device="cuda", backend="reference", depth=2), shuffled(1)), expected)
    tight = World(family, device="cuda", backend="reference", depth=3, num_blocks=22, max_num_batched_tokens=24, caching=True)
    same(serve(tight, shuffled(2)), expected)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.endswith(IN_FP8)])
def test_the_kernel_meets_no_nan_in_fp8(family: str) -> None:
    """Blocks of several groups share bytes: a scale of one may be read as e4m3 by another."""
    world = World(family, device="cuda", backend="triton", depth=2, num_blocks=22, max_num_batched_tokens=24, caching=True)
    outcomes = [outcome for samples in serve(world, shuffled(3)).values() for outcome in samples]
    assert len(outcomes) >= len(REQUESTS) and all(outcome.error is None and outcome.token_ids for outcome in outcomes)


def test_the_runner_keeps_time() -> None:
    world = World(device="cuda", backend="reference")
    engine = Engine(world)
    engine.add(*REQUESTS)
    engine.run()
    assert all(result.forward_seconds > 0 and result.sample_seconds > 0 for result in engine.results)


@pytest.mark.parametrize(
    "kind",
    [{"temperature": 0.0}, {}, {"top_k": 30}, {"top_p": 0.9}, {"min_p": 0.02, "top_p": 0.95}, {"top_k": 900, "top_p": 0.99}],
    ids=str,
)
def test_both_devices_draw_the_same(kind: dict[str, float]) -> None:
    logits = torch.randn(16, 5000, generator=torch.Generator().manual_seed(1)) * 2
    drawn = []
    for name in ("cpu", "cuda"):
        device = torch.device(name)
        sampler = Sampler(16, 5000, device, None)
        params = SamplingParams(**kind, frequency_penalty=0.5, logit_bias={7: 2.0})
        for slot in range(16):
            sampler.add(slot, NewSequence(slot, slot, pack_tokens([1, 2, 3]), 2, params, slot, 0, [], None))
        tokens = []
        for step in range(20):
            index = torch.arange(16)
            outputs, positions = np.full(16, 1 + step), torch.full((16,), 3 + step, device=device)
            rows = LogitsRows(index.numpy(), outputs, index.to(device), positions, index.numpy())
            tokens.append(sampler.sample(logits.to(device).clone(), rows).tokens.tolist())
        drawn.append(tokens)
    assert drawn[0] == drawn[1]


def test_random_numbers_are_the_same_bits() -> None:
    counter = torch.randint(0, 2**32, (4, 1000), generator=torch.Generator().manual_seed(0))
    key = torch.randint(0, 2**32, (2, 1000), generator=torch.Generator().manual_seed(1))
    assert torch.equal(philox(counter, key), philox(counter.cuda(), key.cuda()).cpu())
