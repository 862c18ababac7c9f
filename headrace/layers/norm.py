"""RMS norm, alone or fused with the addition to the residual stream."""

from __future__ import annotations

import torch
from torch import nn

from headrace.kernels.norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension, in float32 inside."""

    plain = True
    """False in a class that computes anything else: kernels must then leave the norm to it."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(x + residual), x + residual)``"""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"
