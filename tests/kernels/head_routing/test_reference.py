"""Routing of heads: pooling and the router."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headrace.kernels.head_routing import RouterWeights, pool_keys, route


def router(width: int, *, dtype: torch.dtype = torch.float32) -> tuple[RouterWeights, nn.Module, nn.Module]:
    """Weights, and the two modules of the published code that they are of."""
    features = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
    logits = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width), nn.SiLU(), nn.Linear(width, 2))
    linears = [part for module in (features, logits) for part in module if isinstance(part, nn.Linear)]
    weights = [parameter.detach().to(dtype) for part in linears for parameter in (part.weight, part.bias)]
    return RouterWeights(*weights), features, logits


@pytest.mark.parametrize("length", [1, 99, 100, 101, 150, 199, 200, 201, 777])
def test_pooling(length: int) -> None:
    """A token counts as often as it is among the first 100 and the last 100."""
    keys = torch.randn(length, 2, 8, dtype=torch.float64)
    count = min(100, length)
    weights = torch.tensor([(t < count) + (t >= length - count) for t in range(length)], dtype=torch.float64)
    expected = (weights[:, None, None] * keys).sum(0) / weights.sum()
    chosen = keys[[*range(count), *range(length - count, length)]]
    assert len(chosen) <= 200
    torch.testing.assert_close(pool_keys(chosen, torch.tensor([0, len(chosen)], dtype=torch.int32))[0], expected)


def test_sequences_are_pooled_alone() -> None:
    keys = torch.randn(30, 2, 8).bfloat16()
    pooled = pool_keys(keys, torch.tensor([0, 10, 10, 30], dtype=torch.int32))
    assert pooled.dtype == torch.float32 and not pooled[1].any()
    assert torch.equal(pooled[0], pool_keys(keys[:10], torch.tensor([0, 10], dtype=torch.int32))[0])
    assert torch.equal(pooled[2], pool_keys(keys[10:], torch.tensor([0, 20], dtype=torch.int32))[0])
    torch.testing.assert_close(pooled[2], keys[10:].float().mean(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_router_is_that_of_the_published_code(dtype: torch.dtype) -> None:
    weights, features, logits = router(16, dtype=dtype)
    pooled = torch.randn(50, 3, 16) * 30
    with torch.no_grad():
        for parameters in (features, logits):
            for parameter in parameters.parameters():
                parameter.copy_(parameter.to(dtype))
        expected = logits(features(pooled)).argmax(-1)
    got = route(pooled, weights)
    assert got.dtype == torch.int8 and torch.equal(got.long(), expected)
    assert 0 < int(got.sum()) < got.numel()


def test_a_tie_is_a_sparse_head() -> None:
    weights, _, _ = router(16)
    tied = weights._replace(router_out=torch.ones(2, 16), router_out_bias=torch.ones(2))
    assert not route(torch.randn(4, 3, 16), tied).any()
    above = torch.tensor([1.0, 1.0 + 1e-3])
    assert route(torch.randn(4, 3, 16), tied._replace(router_out_bias=above)).all()
