"""Layers of one input whose weights lie behind each other: one product gives the results of both."""

from __future__ import annotations

from unittest import mock

import torch

from headrace.layers import linear as layers
from headrace.layers.linear import Linear, lay_behind, multiply_together


def test_one_product_gives_both_results() -> None:
    torch.manual_seed(0)
    first, second = (Linear(24, outputs, dtype=torch.float32, device="cpu") for outputs in (40, 8))
    for layer in (first, second):
        layer.weight.data.normal_()
    x = torch.randn(5, 24)

    def products() -> int:
        with mock.patch.object(layers, "linear", wraps=layers.linear) as product:
            got = multiply_together(x, first, second)
        torch.testing.assert_close(got, (x @ first.weight.T, x @ second.weight.T))
        return product.call_count

    assert products() == 2
    before = first.weight, first.weight.clone(), second.weight.clone()
    lay_behind((first, second))
    assert first.weight is before[0] and torch.equal(first.weight, before[1]) and torch.equal(second.weight, before[2])
    assert products() == 1
    second.weight.copy_(torch.randn(8, 24))
    assert products() == 1
    second.weight.data = torch.randn(8, 24)
    assert products() == 2
