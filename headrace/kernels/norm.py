"""RMS normalisation (Zhang and Sennrich, 2019), alone and with the residual sum before it."""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm as wide_rms_norm

from headrace.kernels import gpu
from headrace.kernels.native.library import DTYPES, kernels_for


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension.

    Computed in float32 and rounded to x's dtype before the weight is applied, as Hugging Face's LlamaRMSNorm does.

    Args:
        x: ``[..., n]``
        weight: ``[n]``
    """
    if gpu.takes(x) and weight.dtype == x.dtype:
        return gpu.kernels("norm").rms_norm(x, weight, eps)  # type: ignore[no-any-return]
    native = kernels_for(x)
    if native is None or weight.dtype != x.dtype:
        return rms_norm_twin(x, weight, eps)
    x = x.contiguous()
    out = torch.empty_like(x)
    n = x.shape[-1]
    native.rms_norm(x.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), x.numel() // n, n, DTYPES[x.dtype])
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(``rms_norm`` of ``x + residual``, and ``x + residual`` itself, rounded to x's dtype: the new residual).

    Args:
        x, residual: ``[..., n]``
        weight: ``[n]``
    """
    if gpu.takes(x) and x.dtype == residual.dtype == weight.dtype:
        return gpu.kernels("norm").add_rms_norm(x, residual, weight, eps)  # type: ignore[no-any-return]
    native = kernels_for(x)
    if native is None or not x.dtype == residual.dtype == weight.dtype:
        return add_rms_norm_twin(x, residual, weight, eps)
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    n = x.shape[-1]
    native.add_rms_norm(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        total.data_ptr(),
        x.numel() // n,
        n,
        DTYPES[x.dtype],
    )
    return out, total


def rms_norm_twin(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm_twin(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return rms_norm_twin(total, weight, eps), total


def offset_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * (1 + weight)`` over the last dimension, in float32 and rounded once: Gemma 1 to 3.

    Args:
        x: ``[..., n]``
        weight: ``[n]``
    """
    if gpu.takes(x) and weight.dtype == x.dtype:
        return gpu.kernels("norm").rms_norm(x, weight, eps, offset=True)  # type: ignore[no-any-return]
    return offset_rms_norm_twin(x, weight, eps)


def add_offset_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(``offset_rms_norm`` of ``x + residual``, and ``x + residual`` itself, rounded to x's dtype: the new residual)."""
    if gpu.takes(x) and x.dtype == residual.dtype == weight.dtype:
        return gpu.kernels("norm").add_rms_norm(x, residual, weight, eps, offset=True)  # type: ignore[no-any-return]
    return add_offset_rms_norm_twin(x, residual, weight, eps)


def offset_rms_norm_twin(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return wide_rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)


def add_offset_rms_norm_twin(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return offset_rms_norm_twin(total, weight, eps), total


def norm_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    first: torch.Tensor,
    first_eps: float,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x through one norm, added to the residual, and the sum through the next: what stands between Gemma's parts.

    Args:
        x, residual: ``[..., n]``
        first, first_eps: ``[n]``, of x's own norm.
        weight, eps: ``[n]``, of the sum's.
        offset: both norms are ``offset_rms_norm``, else ``rms_norm``.

    Returns:
        The norm of the sum, and the sum, both ``[..., n]`` of x's dtype.
    """
    if gpu.takes(x) and x.dtype == residual.dtype == first.dtype == weight.dtype:
        kernels = gpu.kernels("norm")
        return kernels.norm_add_rms_norm(x, residual, first, first_eps, weight, eps, offset=offset)  # type: ignore[no-any-return]
    if offset:
        return add_offset_rms_norm(offset_rms_norm(x, first, first_eps), residual, weight, eps)
    return add_rms_norm(rms_norm(x, first, first_eps), residual, weight, eps)


def norm_add_rms_norm_twin(
    x: torch.Tensor,
    residual: torch.Tensor,
    first: torch.Tensor,
    first_eps: float,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    if offset:
        return add_offset_rms_norm_twin(offset_rms_norm_twin(x, first, first_eps), residual, weight, eps)
    return add_rms_norm_twin(rms_norm_twin(x, first, first_eps), residual, weight, eps)
