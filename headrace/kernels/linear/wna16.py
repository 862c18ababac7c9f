"""Products of float activations with weights of 4 and 8 bits (W4A16, W8A16). Sums are float32, and scales are not rounded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.kernels import gpu
from headrace.kernels.linear import cuda_wna16
from headrace.kernels.linear.reference import linear_ref
from headrace.kernels.linear.wna16_reference import PackedWeight, wna16_linear_ref
from headrace.kernels.linear.wna16_tilings import INVARIANT, many_rows

if TYPE_CHECKING:
    from headrace.kernels.linear import triton_wna16 as kernels
else:
    kernels = gpu.Late("headrace.kernels.linear.triton_wna16")

FEW_ROWS = 8
"""Up to this many rows, codes meet x in the registers of warps that share the inputs."""


def wna16_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """``x W^T + bias``

    Args:
        x: ``[T, K]``, last axis contiguous.
        bias: ``[N]``
        out_dtype: dtype of the result; None: x's.
        batch_invariant: a row comes out bitwise the same in any batch.
    """
    dtype, rows = out_dtype or x.dtype, len(x)
    if not rows:
        return x.new_empty(0, weight.outputs, dtype=dtype)
    if not gpu.takes(x) or x.dtype == torch.float32:
        return wna16_linear_ref(x, weight, bias, dtype)
    if batch_invariant:
        return kernels.many(x, weight, bias, dtype, INVARIANT)
    if rows <= FEW_ROWS:
        return kernels.few(x, weight, bias, dtype)
    if dtype == x.dtype and (tiling := cuda_wna16.choose(x, weight, bias)) is not None:
        return cuda_wna16.linear(x, weight, bias, tiling)
    if rows <= many_rows(weight):
        return kernels.many(x, weight, bias, dtype)
    # The weight is dequantised, and the product is the library's.
    return linear_ref(x, kernels.floats(weight, x.dtype), bias, out_dtype)


def wna16_gated(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor | None:
    """``silu(gate) * up`` of the halves of ``x W^T``: ``[T, K] -> [T, N / 2]``; None where no kernel does both."""
    if not gpu.takes(x) or x.dtype == torch.float32 or not len(x):
        return None
    if (tiling := cuda_wna16.choose(x, weight, gated=True)) is not None:
        return cuda_wna16.linear(x, weight, None, tiling, gated=True)
    if len(x) > FEW_ROWS or weight.outputs % 16:
        return None
    if cuda_wna16.gates_few(x, weight):
        return cuda_wna16.few_gated(x, weight)
    return kernels.few(x, weight, None, x.dtype, gated=True)
