"""RMS normalisation by the native kernels. None: the library is not there, or does not support the tensors' dtypes."""

from __future__ import annotations

import torch

from headrace.kernels.native.library import DTYPES, kernels_for


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
    if (native := kernels_for(x, weight)) is None:
        return None
    x = x.contiguous()
    out = torch.empty_like(x)
    n = x.shape[-1]
    native.rms_norm(x.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), x.numel() // n, n, DTYPES[x.dtype])
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if (native := kernels_for(x, residual, weight)) is None:
        return None
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    n = x.shape[-1]
    inputs, outputs = (x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps), (out.data_ptr(), total.data_ptr())
    native.add_rms_norm(*inputs, *outputs, x.numel() // n, n, DTYPES[x.dtype])
    return out, total
