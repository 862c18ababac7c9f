"""The matrix product of a layer by PyTorch's library."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    if out_dtype is None or out_dtype == x.dtype:
        return F.linear(x, weight, bias)
    if x.is_cuda and x.ndim == 2 and bias is None and out_dtype == torch.float32:
        return torch.mm(x, weight.t(), out_dtype=out_dtype)
    return F.linear(x, weight, bias).to(out_dtype)


def linear_by_head_ref(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1))
