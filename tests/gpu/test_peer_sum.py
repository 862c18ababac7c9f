"""Kernels of several ranks that run at the same time on one GPU, each on a stream of its own, and wait for each other."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from headrace.kernels.norm import ResidualNorm
from headrace.parallel.group import ordered_sum

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
kernels = pytest.importorskip("headrace.kernels.peer_sum.triton")
TRIES = 1 << 24
"""Some seconds: a kernel that waits in vain ends, and the test fails."""


def ranks(size: int) -> list[Any]:
    memory = [torch.full((kernels.nbytes(size),), kernels.EMPTY_BYTE, dtype=torch.uint8, device="cuda") for _ in range(size)]

    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device="cuda")

    alarms = [torch.zeros(1, dtype=torch.int32, pin_memory=True) for _ in range(size)]
    return [kernels.PeerBuffers(rank, memory, zeros(kernels.ROWS), zeros(1), alarms[rank]) for rank in range(size)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums_of_ranks_that_are_late_in_turn(dtype: torch.dtype) -> None:
    """Two ranks: programs of more would have to run at the same time on one GPU than it promises to."""
    size, chance = 2, random.Random(2)
    torch.manual_seed(0)
    group, streams = ranks(size), [torch.cuda.Stream() for _ in range(size)]
    weight = torch.rand(2048, device="cuda").to(dtype)
    norm = ResidualNorm(weight, 1e-6)
    shapes = [(chance.choice((1, 2, 7, 16)), 2048) for _ in range(24)]
    inputs = [[torch.randn(shape, device="cuda").to(dtype) for _ in range(size)] for shape in shapes]
    residuals = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    kernels.peer_sum_norm(inputs[0][0], residuals[0], norm, ranks(size)[0], 0)  # Compiles.
    kernels.peer_sum(inputs[0][0], ranks(size)[0], 0)
    torch.cuda.synchronize()
    found: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in range(size)]

    def run(rank: int) -> None:
        for number, xs in enumerate(inputs):
            if chance.random() < 0.3:
                torch.cuda._sleep(chance.randrange(100_000))
            alone = (kernels.peer_sum(xs[rank], group[rank], TRIES),)
            found[rank].append((*alone, *kernels.peer_sum_norm(xs[rank], residuals[number], norm, group[rank], TRIES)))

    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            run(rank)
    torch.cuda.synchronize()
    assert not any(int(one.alarm) for one in group)
    for number, xs in enumerate(inputs):
        total = ordered_sum(torch.stack(xs))
        for rank in range(size):
            summed, normed, stream = found[rank][number]
            assert torch.equal(summed, total) and torch.equal(stream, total + residuals[number])
            assert torch.equal(normed, found[0][number][1])
            expected = norm._replace(weight=weight.cpu()).add(total.cpu(), residuals[number].cpu())[0]
            torch.testing.assert_close(normed.cpu(), expected, atol=1e-5, rtol=0.02 if dtype == torch.bfloat16 else 1e-4)
