"""The matrix product of a layer: a library's, but for the few rows at which another kernel is faster."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.kernels import gpu

FEW_ROWS = 1
"""Up to which the Triton kernel beats cuBLAS on the GPUs measured (see benchmarks/)."""


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    invariant: bool = False,
) -> torch.Tensor:
    """``x W^T + bias``.

    Args:
        x: ``[..., in]``
        weight: ``[out, in]``
        bias: ``[out]``
        out_dtype: of the result; None: x's. Where the product can be had unrounded, it is rounded once, to this.
        invariant: a row comes out bitwise the same whatever the other rows: on a GPU, for a 2-dimensional x.
    """
    if invariant and x.ndim == 2 and gpu.takes(x) and weight.dtype == x.dtype:
        return gpu.kernels("matmul").matmul(x, weight, bias, out_dtype)  # type: ignore[no-any-return]
    if x.ndim == 2 and 0 < len(x) <= FEW_ROWS and gpu.takes(x) and weight.dtype == x.dtype:
        return gpu.kernels("linear").linear(x, weight, bias, out_dtype=out_dtype)  # type: ignore[no-any-return]
    if out_dtype is None or out_dtype == x.dtype:
        return F.linear(x, weight, bias)
    if x.is_cuda and x.ndim == 2 and bias is None and out_dtype == torch.float32:
        return torch.mm(x, weight.t(), out_dtype=out_dtype)
    return F.linear(x, weight, bias).to(out_dtype)


def linear_by_head(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, invariant: bool = False) -> None:
    """``out[t, h] = weight[h] x[t, h]``.

    Args:
        x: ``[T, heads, in]``, last axis contiguous.
        weight: ``[heads, out, in]``; one of the last two axes is contiguous.
        out: ``[T, heads, out]``, last axis contiguous; filled.
        invariant: as for ``linear``.
    """
    if invariant and gpu.takes(x) and weight.dtype == x.dtype:
        gpu.kernels("matmul").matmul_by_head(x, weight, out)
    else:
        out.copy_(torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1))
