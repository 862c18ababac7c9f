"""RMS normalisation in plain PyTorch."""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm as wide_rms_norm


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: bool = False) -> torch.Tensor:
    wide = x.float()
    if offset:
        return wide_rms_norm(wide, weight.shape, 1 + weight.float(), eps).to(x.dtype)
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
