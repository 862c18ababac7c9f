"""RMS norm, alone or with the sum over ranks and the addition to the residual stream before it."""

from __future__ import annotations

import torch
from torch import nn

from headrace.kernels.norm import ResidualNorm, rms_norm
from headrace.parallel.group import ALONE, Group


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension, in float32 inside."""

    plain = True
    """False in a class that computes anything else: kernels must then leave the norm to it."""
    offset = False
    """It multiplies by ``1 + weight``, which kernels support too."""
    group: Group = ALONE
    """The ranks that ``add`` and ``add_normed`` sum over."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, offset=self.offset)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(total + residual), total + residual)``, where total is the sum of the ranks' x."""
        return self.group.add_norm(x, residual, ResidualNorm(self.weight, self.eps, self.offset))

    def add_normed(self, x: torch.Tensor, first: RMSNorm, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(first(total) + residual), first(total) + residual)``, where total is the sum of the ranks' x."""
        norm = ResidualNorm(self.weight, self.eps, self.offset)
        if type(first) is not type(self) or not (self.plain or self.offset):
            return norm.add(first(self.group.all_reduce(x)), residual)
        return self.group.add_norm(x, residual, norm._replace(first=first.weight, first_eps=first.eps))

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"


class OffsetRMSNorm(RMSNorm):
    """``x / rms(x) * (1 + weight)``, rounded once: Gemma 1 to 3."""

    plain = False
    offset = True


class UnitRMSNorm(nn.Module):
    """``x / rms(x)`` over the last dimension: a norm without weights."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.ones: torch.Tensor
        self.register_buffer("ones", torch.ones(width, dtype=dtype, device=device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.ones, self.eps)
