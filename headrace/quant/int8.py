"""PyTorch's packed int8 product for the CPU: one scale for each output."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.layers.linear import Linear
from headrace.layers.stored import StoredMatrix
from headrace.quant.groups import rows_at_once
from headrace.quant.packed import PackedMethod, finish, rounding_error


class Int8Method(PackedMethod):
    """``weight = scale * code``, code -127 to 127, rounded from a float matrix.

    Buffers: ``codes`` ``[N, K]`` int8; ``scales`` ``[N]`` in the dtype of the activations.
    """

    format = "int8, a scale for each output"
    # The kernel reads inputs by sixteens and does not check bounds.
    multiples = 1, 16

    def load(self, layer: Linear, parts: Sequence[StoredMatrix]) -> float:
        codes = torch.empty(layer.out_features, layer.in_features, dtype=torch.int8)
        scales = torch.empty(layer.out_features, dtype=self.dtype)
        start, size = 0, rows_at_once(layer.in_features)
        for part in parts:
            # A few rows at a time: each step is a float32 copy.
            exact = part.exact()
            for first in range(0, len(exact), size):
                weight = exact[first : first + size].float()
                here = slice(start + first, start + first + len(weight))
                scales[here] = (weight.abs().amax(1) / 127).to(self.dtype)
                # The codes are chosen for the scale that is kept, so that its rounding costs nothing.
                kept = scales[here].float()
                inverse = torch.where(kept > 0, 1 / kept, torch.zeros_like(kept))
                codes[here] = (weight * inverse[:, None]).round_().clamp_(-127, 127).to(torch.int8)
            start += len(exact)
        layer.register_buffer("codes", codes)
        layer.register_buffer("scales", scales)
        return rounding_error(lambda here: codes[here].float() * scales[here, None].float(), parts)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, layer.in_features).contiguous()
        y = torch.ops.aten._weight_int8pack_mm(rows, layer.codes, layer.scales)
        return finish(layer, y.view(*x.shape[:-1], layer.out_features))

    def dequantize(self, layer: Linear) -> torch.Tensor:
        return layer.get_buffer("codes").float() * layer.get_buffer("scales").float()[:, None]
