"""PyTorch's packed int8 product for the CPU: one scale for each output."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.layers.linear import Linear
from headrace.layers.stored import StoredMatrix
from headrace.quant.packed import PackedMethod, finish, rounding_error


class Int8Method(PackedMethod):
    """``weight = scale * code``, code -127 to 127, rounded from a float matrix.

    Buffers: ``codes`` ``[N, K]`` int8; ``scales`` ``[N]`` in the dtype of the activations.
    """

    format = "int8, a scale for each output"
    # The kernel reads inputs by sixteens and does not check bounds.
    multiples = 1, 16

    def load(self, layer: Linear, parts: Sequence[StoredMatrix]) -> float:
        weight = torch.cat([part.exact() for part in parts]).float()
        scales = (weight.abs().amax(1) / 127).to(self.dtype)
        # The codes are chosen for the scale that is kept, so that its rounding costs nothing.
        inverse = torch.where(scales > 0, 1 / scales.float(), torch.zeros_like(scales, dtype=torch.float32))
        layer.register_buffer("codes", (weight * inverse[:, None]).round_().clamp_(-127, 127).to(torch.int8))
        layer.register_buffer("scales", scales)
        return rounding_error(self.dequantize(layer), parts)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, layer.in_features).contiguous()
        y = torch.ops.aten._weight_int8pack_mm(rows, layer.codes, layer.scales)
        return finish(layer, y.view(*x.shape[:-1], layer.out_features))

    def dequantize(self, layer: Linear) -> torch.Tensor:
        return layer.get_buffer("codes").float() * layer.get_buffer("scales").float()[:, None]
