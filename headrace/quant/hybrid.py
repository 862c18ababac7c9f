"""HybridLinear: packed weights for few rows, a plain copy of them for prompts and large batches."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from headrace.quant.packed import PackedLinear


class HybridLinear(PackedLinear):
    """Packed products read less memory but compute more slowly than plain ones: above ``crossover`` rows the copy is faster.

    Both hold the same numbers, up to the rounding to the copy's dtype.
    """

    packed: PackedLinear
    copy: torch.Tensor

    def __init__(self, packed: PackedLinear, copy: torch.Tensor, crossover: int) -> None:
        """Args: copy: ``[out_features, in_features]``. crossover: the most rows that go to ``packed``."""
        bias = None if packed.bias is None else packed.bias.data.to(copy.dtype)
        super().__init__(packed.in_features, packed.out_features, bias)
        self.packed = packed
        self.crossover = crossover
        self.format = f"{packed.format}; a copy in {str(copy.dtype).removeprefix('torch.')} above {crossover} rows"
        self.register_buffer("copy", copy)

    def dequantize(self) -> torch.Tensor:
        return self.packed.dequantize()

    @property
    def copy_nbytes(self) -> int:
        return int(self.copy.nbytes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features] -> [..., out_features]``"""
        if x.numel() <= self.crossover * self.in_features:
            y: torch.Tensor = self.packed(x)
        else:
            y = linear(x, self.copy, self.bias)
        return y if self.out_dtype is None else y.to(self.out_dtype)
