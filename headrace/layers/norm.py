"""RMS norm, alone or with the sum over ranks and the addition to the residual stream before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from headrace.kernels.linear.fp8_reference import Activations
from headrace.kernels.norm import ResidualNorm, rms_norm, rounded_rms_norm
from headrace.parallel.group import ALONE, Group


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension, in float32 inside."""

    plain = True
    """False in a class that computes anything else: kernels must then leave the norm to it."""
    offset = False
    """The norm multiplies by ``1 + weight``, which kernels support too."""
    group: Group = ALONE
    """The ranks that ``add`` and ``add_normed`` sum over."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device), requires_grad=False)
        self.rounds: int | None = None
        """Norms are ``Fp8Rows`` with a scale for each so many channels, as all that reads them needs; None: they are floats."""

    def forward(self, x: torch.Tensor) -> Activations:
        if self.rounds is not None:
            return rounded_rms_norm(x, self.weight, self.eps, self.rounds, offset=self.offset)
        return rms_norm(x, self.weight, self.eps, offset=self.offset)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[Activations, torch.Tensor]:
        """``(norm(total + residual), total + residual)``, where total is the sum of the ranks' x."""
        return self.group.add_norm(x, residual, self._behind_sum())

    def add_normed(self, x: torch.Tensor, first: RMSNorm, residual: torch.Tensor) -> tuple[Activations, torch.Tensor]:
        """``(norm(first(total) + residual), first(total) + residual)``, where total is the sum of the ranks' x."""
        norm = self._behind_sum()
        if type(first) is not type(self) or not (self.plain or self.offset):
            return norm.add(first(self.group.all_reduce(x)), residual)
        return self.group.add_norm(x, residual, norm._replace(first=first.weight, first_eps=first.eps))

    def _behind_sum(self) -> ResidualNorm:
        return ResidualNorm(self.weight, self.eps, self.offset, rounds=self.rounds)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"


class OffsetRMSNorm(RMSNorm):
    """``x / rms(x) * (1 + weight)``, rounded once: Gemma 1 to 3."""

    plain = False
    offset = True


class ShardedRMSNorm(RMSNorm):
    """``x / rms(x) * weight`` over channels that are dealt to tensor-parallel ranks, some of them to several ranks.

    Args:
        width: the rank's channels.
        of: the channels of all ranks, each counted once.
        ranks: their number.
    """

    plain = False

    def __init__(
        self, width: int, eps: float, *, of: int, ranks: int = 1, dtype: torch.dtype, device: str | torch.device
    ) -> None:
        super().__init__(width, eps, dtype=dtype, device=device)
        self.copies = width * ranks // of
        """Ranks that hold the same channels."""
        self.of = of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return norm_together((self,), (x,))[0]


def norm_together(norms: Sequence[ShardedRMSNorm], xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Applies each norm to its ``[T, width]``, with one sum over ranks for all of them."""
    group = norms[0].group
    if group.size == 1:
        return [rms_norm(x.contiguous(), norm.weight, norm.eps) for norm, x in zip(norms, xs, strict=True)]
    wide = [x.float() for x in xs]
    squares = [x.square().sum(1, keepdim=True) / norm.copies for norm, x in zip(norms, wide, strict=True)]
    sums = group.all_reduce(torch.cat(squares, dim=1)).unbind(1)
    return [
        (x * torch.rsqrt(total[:, None] / norm.of + norm.eps) * norm.weight.float()).to(norm.weight.dtype)
        for norm, x, total in zip(norms, wide, sums, strict=True)
    ]


class UnitRMSNorm(nn.Module):
    """``x / rms(x)`` over the last dimension: a norm without weights."""

    plain, offset = True, False

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.ones: torch.Tensor
        self.register_buffer("ones", torch.ones(width, dtype=dtype, device=device), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.ones

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.ones, self.eps)
