"""A single token with an adapter: A in the kernel of the layer's own product, and B behind it or in the activation."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import gpu
from headrace.kernels import linear as product
from headrace.kernels.activation.triton import silu_mul
from headrace.kernels.linear.triton import linear, linear_and_low
from headrace.kernels.lora import triton as kernels
from headrace.kernels.lora.reference import Factors

from .test_lora import NONE, case, ends_of, expected


def factors_of(
    parts: tuple[int, ...], channels: int, rank: int, place: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, Factors]:
    """x, a weight, whose rows lie apart, and an adapter."""
    _, x, a, b, places = case([place], parts, channels, rank, dtype, device)
    wide = torch.randn(sum(parts), channels + 10).to(device, dtype)
    factors = Factors((channels**-0.5 * a).contiguous(), b, ends_of(parts), (), places)
    return x, (channels**-0.5 * wide)[:, :-10], factors


CASES = [((40,), 70, 8), ((24, 9, 16), 536, 5), ((150, 150), 1200, 16), ((30, 33), 4100, 64)]
"""Outputs of the parts, channels and rank."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [2, 0, NONE])
@pytest.mark.parametrize(("parts", "channels", "rank"), CASES)
def test_sums(parts: tuple[int, ...], channels: int, rank: int, place: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, factors = factors_of(parts, channels, rank, place, dtype, device)
    bias = torch.randn(sum(parts)).to(device, dtype) if rank == 16 else None
    base = linear(x, weight, bias)
    y, low = linear_and_low(x, weight, bias, factors)
    assert torch.equal(y, base)
    gated = kernels.expand_gated(factors.added(low), y) if parts[0] == sum(parts[1:]) else None
    assert factors.places is not None
    kernels.expand(factors.added(low), factors.places, y)
    assert gated is None or torch.equal(gated, silu_mul(y))
    if place == NONE:
        assert torch.equal(y, base)
        return
    assert (low[0].double() - x.double() @ factors.a[place].double().T).abs().amax() < 1e-5
    wanted = x.double() @ weight.double().T
    wanted = expected(wanted if bias is None else wanted + bias.double(), x, factors.a, factors.b, factors.places, parts)
    assert (y.double() - wanted).abs().amax() < (1e-5 if dtype == torch.float32 else 1e-2) * wanted.abs().amax()


def test_layers_take_them(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    x, weight, factors = factors_of((32, 32), 96, 8, 1, torch.float32, device)
    monkeypatch.setattr(gpu, "takes", lambda x: True)
    exact = product.linear_adapted(x, weight, None, None, factors, batch_invariant=True)
    calls: list[str] = []
    monkeypatch.setattr(product.kernels, "linear_and_low", lambda *args: (calls.append("both"), linear_and_low(*args))[1])
    y = product.linear_adapted(x, weight, None, None, factors)
    gated = product.linear_adapted_gated(x, weight, factors)
    assert gated is not None and torch.equal(gated, silu_mul(y)) and calls == ["both", "both"]
    torch.testing.assert_close(y, exact)
    product.linear_adapted(x, weight, None, None, factors, batch_invariant=True)
    assert product.linear_adapted_gated(x, weight, factors, batch_invariant=True) is None
    assert product.linear_adapted_gated(x.expand(2, -1), weight, factors) is None and len(calls) == 2


def test_tensors_that_do_not_fit_are_refused(device: torch.device) -> None:
    x, weight, factors = factors_of((32, 32), 96, 8, 1, torch.float32, device)
    y, low = linear_and_low(x, weight, None, factors)
    for wrong in ((x.expand(2, -1), weight), (x[:, 1:], weight[:, 1:]), (x.half(), weight.half())):
        with pytest.raises(ValueError, match="not fit"):
            linear_and_low(*wrong, None, factors)
    for wrong_low, wrong_y in ((low.expand(2, -1, -1), y), (low, y[:, 1:])):
        with pytest.raises(ValueError, match="no products of one row"):
            kernels.expand_gated(factors.added(wrong_low), wrong_y)
