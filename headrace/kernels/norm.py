"""RMS normalisation (Zhang and Sennrich, 2019), alone and with the residual sum before it."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension.

    Computed in float32 and rounded to x's dtype before the weight is applied, as Hugging Face's LlamaRMSNorm does.

    Args:
        x: ``[..., n]``
        weight: ``[n]``
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(``rms_norm`` of ``x + residual``, and ``x + residual`` itself, rounded to x's dtype: the new residual).

    Args:
        x, residual: ``[..., n]``
        weight: ``[n]``
    """
    total = x + residual
    return rms_norm(total, weight, eps), total
