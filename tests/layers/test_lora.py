"""Tables of adapters: what a layer adds for the tokens of a step."""

from __future__ import annotations

import torch

from headrace.kernels.activation import silu_mul
from headrace.kernels.linear.fp8_reference import Fp8Rows, round_rows_ref
from headrace.kernels.lora import Segment
from headrace.layers.linear import Linear, UnquantizedMethod
from headrace.layers.lora import LoraPart, LoraRows, LoraTables


class Rounded(UnquantizedMethod):
    """A format that multiplies rows in FP8."""

    def group(self, layer: Linear) -> int:
        return 16

    def apply_rounded(self, layer: Linear, x: Fp8Rows) -> torch.Tensor:
        return self.apply(layer, x.codes.float() * x.scales.repeat_interleave(16, 1))


def made(rows: LoraRows, outputs: int = 24, inputs: int = 32) -> Linear:
    layer = Linear(inputs, outputs, dtype=torch.float32, device="cpu")
    layer.weight.data.normal_()
    layer.lora = LoraTables(rows, inputs, (outputs,), 8, torch.zeros(2, LoraTables.size(inputs, (outputs,), 8)))
    return layer


def test_a_place_holds_the_last_adapter_that_was_put_there() -> None:
    rows = LoraRows()
    layer, x = made(rows), torch.randn(5, 32)
    large, small = (LoraPart(0, row, torch.randn(rank, 32), torch.randn(9, rank)) for row, rank in ((10, 8), (0, 3)))
    base = layer(x)
    rows.segments = [Segment(1, 3, 1)]
    for parts in ([large], [small], []):
        assert layer.lora is not None
        layer.lora.put(1, parts)
        expected = base.clone()
        for part in parts:
            expected[1:3, part.row : part.row + 9] += x[1:3] @ part.a.T @ part.b.T
        assert torch.allclose(layer(x), expected, atol=1e-4)
    rows.clear()
    assert torch.equal(layer(x), base)


def test_rows_that_are_rounded_already_are_multiplied_as_they_are() -> None:
    rows = LoraRows()
    layer = made(rows)
    layer.method = Rounded()
    part = LoraPart(0, 0, torch.randn(4, 32), torch.randn(24, 4))
    assert layer.lora is not None and layer.rounds == 16
    layer.lora.put(0, [part])
    x = round_rows_ref(torch.randn(6, 32), 16)
    base = layer(x)
    rows.segments = [Segment(2, 6, 0)]
    floats = x.codes.float() * x.scales.repeat_interleave(16, 1)
    assert torch.equal(x.floats(), floats)
    base[2:] += floats[2:] @ part.a.T @ part.b.T
    assert torch.allclose(layer(x), base, atol=1e-4)


class Joint(UnquantizedMethod):
    """A format with a kernel that computes the product and the activation."""

    def apply_gated(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return silu_mul(self.apply(layer, x))


def test_steps_without_adapters_keep_the_product_with_the_activation() -> None:
    rows = LoraRows()
    layer, x = made(rows), torch.randn(5, 32)
    layer.method = Joint()
    gated = layer.gated(x)
    assert gated is not None and torch.equal(gated, silu_mul(layer(x)))
    rows.segments = [Segment(0, 5, 1)]
    assert layer.gated(x) is None
