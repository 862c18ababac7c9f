"""PyTorch's packed int4 product for the CPU: groups of 32, scale and middle of a group in the dtype of the activations."""

from __future__ import annotations

import dataclasses

import torch

from headrace.quant.groups import GROUP, GroupCodes
from headrace.quant.packed import PackedLinear

ANCHOR = 8
"""The kernel keeps a group's value at this code, not its minimum."""
_INNER_TILES = 2
"""An argument of the packing that CPUs ignore."""


def misfit(in_features: int, out_features: int) -> str | None:
    """Why the kernel cannot hold a matrix; None: it can."""
    if out_features % 16:
        return f"{out_features} outputs are not a multiple of 16"
    return f"{in_features} inputs are not a multiple of {GROUP}" if in_features % GROUP else None


def held(weights: GroupCodes, dtype: torch.dtype) -> GroupCodes:
    """The weights as the kernel holds them: scale and middle rounded to ``dtype``."""
    scales = weights.scales.to(dtype).float()
    middles = (weights.mins + ANCHOR * weights.scales).to(dtype).float()
    return dataclasses.replace(weights, scales=scales, mins=middles - ANCHOR * scales)


class Int4Linear(PackedLinear):
    """``weight = scale * (code - 8) + middle``. The codes are kept as they are; scale and middle are rounded to ``dtype``."""

    format = "int4, groups of 32"
    packed: torch.Tensor
    scales: torch.Tensor
    """``[K / 32, N, 2]``: scale and middle."""

    def __init__(self, weights: GroupCodes, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(weights.shape[1], weights.shape[0], bias)
        codes = weights.codes.to(torch.int32)
        self.register_buffer("packed", torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, _INNER_TILES))
        scales = torch.stack((weights.scales, weights.mins + ANCHOR * weights.scales), dim=-1)
        self.register_buffer("scales", scales.transpose(0, 1).contiguous().to(dtype))

    def dequantize(self) -> torch.Tensor:
        # The packing is the kernel's secret: its product with the unit vectors is what it multiplies by.
        eye = torch.eye(self.in_features, dtype=torch.float32)
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(eye, self.packed, GROUP, self.scales.float())
        return y.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features] -> [..., out_features]``"""
        rows = x.reshape(-1, self.in_features)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP, self.scales)
        return self.finish(y.view(*x.shape[:-1], self.out_features))
