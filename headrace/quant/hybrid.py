"""HybridMethod: packed weights for few rows, a copy in floats for prompts and large batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch.nn.functional import linear

from headrace.config import MemoryLine
from headrace.kernels.linear.reference import linear_float32_ref
from headrace.layers.linear import Linear
from headrace.layers.stored import StoredMatrix
from headrace.quant.packed import PackedMethod


class HybridMethod(PackedMethod):
    """Packed products read less memory but compute more slowly: above ``crossover`` rows the product with floats is faster.

    Both hold the same numbers, up to the rounding to the copy's dtype. Buffers: ``copy`` ``[N, K]``, and those of ``packed``.
    """

    def __init__(self, packed: PackedMethod, crossover: int) -> None:
        """``crossover``: the most rows that go to ``packed``."""
        self.packed = packed
        self.constants = packed.constants
        self.crossover = crossover

    def allocate(self, layer: Linear, dtype: torch.dtype, device: str | torch.device) -> None:
        super().allocate(layer, dtype, device)
        self.packed.allocate(layer, dtype, device)
        self.format = f"{self.packed.format}; a copy in {str(dtype).removeprefix('torch.')} above {self.crossover} rows"

    def fresh(self) -> HybridMethod:
        return HybridMethod(cast(PackedMethod, self.packed.fresh()), self.crossover)

    def load(self, layer: Linear, parts: Sequence[StoredMatrix]) -> float:
        error = self.packed.load(layer, parts)
        copy = torch.empty(layer.out_features, layer.in_features, dtype=self.dtype)
        _fill(copy, parts)
        layer.register_buffer("copy", copy)
        return error

    def rewrite(self, layer: Linear, parts: Sequence[StoredMatrix]) -> None:
        self.packed.rewrite(layer, parts)
        _fill(layer.get_buffer("copy"), parts)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        if x.numel() <= self.crossover * layer.in_features:
            return self.packed.apply(layer, x)
        bias = None if layer.bias is None else layer.bias.to(self.dtype)
        if layer.exact:
            return linear_float32_ref(x, layer.get_buffer("copy"), bias)
        y = linear(x, layer.get_buffer("copy"), bias)
        return y if layer.out_dtype is None else y.to(layer.out_dtype)

    def dequantize(self, layer: Linear) -> torch.Tensor:
        return self.packed.dequantize(layer)

    def memory(self, layer: Linear) -> list[MemoryLine]:
        copy = layer.get_buffer("copy").nbytes
        packed = sum(buffer.nbytes for buffer in layer.buffers()) - copy
        return [
            MemoryLine("packed weights", packed, self.packed.format),
            MemoryLine("second copy of packed weights", copy, "for prompts and large batches"),
        ]


def _fill(copy: torch.Tensor, parts: Sequence[StoredMatrix]) -> None:
    start = 0
    for part in parts:
        rows = part.exact()
        copy[start : start + len(rows)] = rows
        start += len(rows)
