"""The matrix product of a layer: a library's, but for the few rows at which another kernel is faster."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.kernels import gpu

FEW_ROWS = 1
"""Up to which the Triton kernel beats cuBLAS on the GPUs measured (see benchmarks/)."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x W^T + bias``.

    Args:
        x: ``[..., in]``
        weight: ``[out, in]``
        bias: ``[out]``
    """
    if x.ndim == 2 and len(x) <= FEW_ROWS and gpu.takes(x) and weight.dtype == x.dtype:
        return gpu.kernels("linear").linear(x, weight, bias)  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)
