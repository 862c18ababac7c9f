"""Products with weights that are packed for the compiled kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.kernels.native.library import DTYPES


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
