"""The kernels that route heads, against their references."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.head_routing import RouterWeights, reference
from headrace.kernels.head_routing.triton import pool_keys, route


def router(width: int, inner: int, dtype: torch.dtype) -> RouterWeights:
    shapes = [(inner, width), (inner,), (width, inner), (width,)] * 2 + [(2, width), (2,)]
    return RouterWeights(*(torch.randn(shape).mul(shape[-1] ** -0.5).to(dtype) for shape in shapes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [64, 96])
def test_pooling(width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Sequences of any number of keys, none among them, within wider rows."""
    keys = torch.randn(240, 3, width + 8).to(dtype)
    starts = torch.tensor([0, 1, 1, 34, 234], dtype=torch.int32)
    got = pool_keys(keys.to(device)[..., 8:], starts.to(device)).cpu()
    torch.testing.assert_close(got, reference.pool_keys(keys[..., 8:].double(), starts).float(), atol=1e-6, rtol=1e-5)
    alone = pool_keys(keys[34:234].to(device)[..., 8:], torch.tensor([0, 200], dtype=torch.int32, device=device)).cpu()
    assert torch.equal(alone[0], got[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("width", "inner"), [(16, 100), *(pytest.param(*widths, marks=pytest.mark.slow) for widths in ((64, 256), (96, 384)))]
)
def test_routing(width: int, inner: int, dtype: torch.dtype, device: torch.device) -> None:
    weights, pooled = router(width, inner, dtype), torch.randn(4, 5, width) * 3
    logits = reference.router_logits_ref(pooled.double(), weights)
    there = RouterWeights(*(part.to(device) for part in weights))
    got = route(pooled.to(device), there).cpu()
    assert (logits[..., 1] - logits[..., 0]).abs().min() > 1e-5
    assert torch.equal(got, (logits[..., 1] > logits[..., 0]).to(torch.int8))
    assert 0 < int(got.sum()) < got.numel()
    assert torch.equal(route(pooled[2:3].to(device), there).cpu(), got[2:3])


def test_a_tie_is_a_sparse_head(device: torch.device) -> None:
    weights = router(16, 64, torch.float32)
    tied = weights._replace(router_out=torch.ones(2, 16), router_out_bias=torch.ones(2))
    pooled = torch.randn(2, 3, 16).to(device)
    assert not route(pooled, RouterWeights(*(part.to(device) for part in tied))).any()
    above = tied._replace(router_out_bias=torch.tensor([1.0, 1.001]))
    assert route(pooled, RouterWeights(*(part.to(device) for part in above))).all()
