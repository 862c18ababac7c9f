"""The matrix product of a layer by PyTorch's library."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_SLICE = 1 << 20
"""Numbers of a weight that are widened at once: they stay in a core's cache."""


def linear_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    if out_dtype is None or out_dtype == x.dtype:
        return F.linear(x, weight, bias)
    if x.is_cuda and x.ndim == 2 and out_dtype == torch.float32:
        y = torch.mm(x, weight.t(), out_dtype=out_dtype)
        return y if bias is None else y + bias
    return F.linear(x, weight, bias).to(out_dtype)


def linear_float32_ref(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [rows, in] W^T + bias`` in float32, whatever the factors' type. One slice of the weight at a time is widened."""
    wide, size = x.float(), max(1, _SLICE // weight.shape[1])
    y = torch.cat([wide @ weight[start : start + size].float().t() for start in range(0, len(weight), size)], dim=1)
    return y if bias is None else y + bias.float()


def linear_by_head_ref(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1))
