"""RMS normalisation by the native kernels, of tensors of one dtype that the library supports."""

from __future__ import annotations

import torch

from headrace.kernels.native.library import DTYPES, NativeKernels


def rms_norm(native: NativeKernels, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    n = x.shape[-1]
    native.rms_norm(x.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), x.numel() // n, n, DTYPES[x.dtype])
    return out


def add_rms_norm(
    native: NativeKernels, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    n = x.shape[-1]
    inputs, outputs = (x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps), (out.data_ptr(), total.data_ptr())
    native.add_rms_norm(*inputs, *outputs, x.numel() // n, n, DTYPES[x.dtype])
    return out, total
