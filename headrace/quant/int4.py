"""PyTorch's packed int4 product for the CPU: groups of 32, scale and middle of a group in the dtype of the activations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from headrace.layers.linear import Linear
from headrace.layers.stored import StoredMatrix
from headrace.quant.groups import GROUP, GroupCodes, rows_at_once
from headrace.quant.packed import PackedMethod, finish, group_codes, rounding_error

ANCHOR = 8
"""The kernel stores a group's value at this code instead of its minimum."""
_INNER_TILES = 2
"""An argument of the packing that CPUs ignore."""
_BLOCK = 64
"""A multiple of the outputs that lie together, whichever instructions the kernel uses."""


def held(weights: GroupCodes, dtype: torch.dtype) -> GroupCodes:
    """Returns the weights as the kernel stores them: scale and middle rounded to ``dtype``."""
    scales = weights.scales.to(dtype).float()
    middles = (weights.mins + ANCHOR * weights.scales).to(dtype).float()
    return dataclasses.replace(weights, scales=scales, offsets=middles - ANCHOR * scales)


class Int4Method(PackedMethod):
    """``weight = scale * (code - 8) + middle``. The codes are kept as they are; scale and middle are rounded to the dtype of
    the activations.

    Buffers: ``packed``; ``scales`` ``[K / 32, N, 2]``, scale and middle.
    """

    format = "int4, groups of 32"
    multiples = 16, GROUP

    def load(self, layer: Linear, parts: Sequence[StoredMatrix]) -> float:
        weights = held(group_codes(parts, 4, self.dtype, ANCHOR), self.dtype)
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        # Some blocks of rows at a time: codes as int32 are twice the weight.
        size = rows_at_once(layer.in_features, _BLOCK)
        starts = range(0, layer.out_features, size)
        packed = [pack(weights.codes[at : at + size].to(torch.int32), _INNER_TILES) for at in starts]
        layer.register_buffer("packed", torch.cat(packed))
        scales = torch.stack((weights.scales, weights.mins + ANCHOR * weights.scales), dim=-1)
        layer.register_buffer("scales", scales.transpose(0, 1).contiguous().to(self.dtype))
        return rounding_error(lambda here: weights.rows(here).dequantize(), parts)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, layer.in_features).contiguous()
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, layer.packed, GROUP, layer.scales)
        return finish(layer, y.view(*x.shape[:-1], layer.out_features))

    def dequantize(self, layer: Linear) -> torch.Tensor:
        # Only the kernel knows its packing, so multiply the unit vectors.
        eye, scales = torch.eye(layer.in_features), layer.get_buffer("scales").float()
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(eye, layer.packed, GROUP, scales)
        return y.t()
