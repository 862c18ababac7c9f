"""A layer with weights in a number format."""

from __future__ import annotations

import torch

from headrace.layers.linear import Linear, LinearMethod
from headrace.layers.stored import StoredMatrix
from headrace.quant.groups import GroupCodes


def stored(weights: GroupCodes | torch.Tensor) -> StoredMatrix:
    if isinstance(weights, GroupCodes):
        return StoredMatrix("codes", weights.dequantize, lambda: weights)
    return StoredMatrix("floats", lambda: weights)


def layer_of(
    method: LinearMethod,
    weights: GroupCodes | torch.Tensor | list[StoredMatrix],
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Linear:
    parts = weights if isinstance(weights, list) else [stored(weights)]
    shapes = [tuple(part.read().shape) for part in parts]
    layer = Linear(shapes[0][1], sum(shape[0] for shape in shapes), bias=bias is not None, dtype=dtype, device="cpu")
    if layer.bias is not None:
        layer.bias.data.copy_(bias)
    method.allocate(layer, dtype, "cpu")
    method.load(layer, parts)
    layer.method = method
    return layer
