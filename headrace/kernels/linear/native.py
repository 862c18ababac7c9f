"""Products by the compiled kernels: with packed weights, and of few rows with weights in bfloat16."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.kernels import native
from headrace.kernels.native.library import DTYPES

_MOST_ROWS = 2
"""Rows up to which the kernel is faster than PyTorch's library, which multiplies tiles of more."""


def packed_linear(
    matmul: Callable[..., None],
    x: torch.Tensor,
    packed: int,
    bias: int | None,
    outputs: int,
    groups: int,
    code: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``x W^T + b``

    Args:
        matmul: of ``NativeKernels``.
        x: ``[T, 32 * groups]`` of a dtype in ``DTYPES``, last axis contiguous.
        packed: address of the weights.
        bias: address of ``[outputs]`` float32.
        code: the weights' number format, as the kernels take it.
        dtype: of the result, likewise in ``DTYPES``.
    """
    rows = x.shape[0]
    y = torch.empty(rows, outputs, dtype=dtype)
    x_kind, y_kind = DTYPES[x.dtype], DTYPES[dtype]
    matmul(x.data_ptr(), x_kind, x.stride(0), packed, bias, y.data_ptr(), y_kind, rows, outputs, groups, code)
    return y


def few_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor | None:
    """``linear`` of x ``[rows, in]``, rounded once; None where the kernel does not compute it."""
    if not (x.dtype == weight.dtype == torch.bfloat16 and 0 < len(x) <= _MOST_ROWS and x.device.type == "cpu"):
        return None
    (rows, inputs), outputs, dtype = x.shape, len(weight), out_dtype or x.dtype
    fits = not (outputs % 4 or inputs % 32) and weight.is_contiguous() and x.stride(1) == 1 and dtype in DTYPES
    if not fits or (kernels := native.load()) is None:
        return None
    y = torch.empty(rows, outputs, dtype=dtype)
    at = None if bias is None else bias.data_ptr()
    kernels.few_rows(x.data_ptr(), x.stride(0), weight.data_ptr(), at, y.data_ptr(), DTYPES[dtype], rows, outputs, inputs)
    return y
