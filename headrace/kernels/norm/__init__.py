"""RMS normalisation (Zhang and Sennrich, 2019), alone and with the residual sum before it.

With ``offset`` the weight is stored less one: the norm is ``x / sqrt(mean(x ** 2) + eps) * (1 + weight)``, in float32 and
rounded once, as in Gemma 1 to 3. Without it, the result is rounded to x's dtype before the weight is applied, as in Hugging
Face's LlamaRMSNorm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from headrace.kernels import gpu
from headrace.kernels.linear.fp8 import round_rows
from headrace.kernels.linear.fp8_reference import Activations, Fp8Rows
from headrace.kernels.norm import native
from headrace.kernels.norm.reference import rms_norm_ref

if TYPE_CHECKING:
    from headrace.kernels.norm import triton as kernels
else:
    kernels = gpu.Late(f"{__name__}.triton")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: bool = False) -> torch.Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension, computed in float32.

    Args:
        x: ``[..., n]``
        weight: ``[n]``
        offset: multiply by ``1 + weight``.
    """
    if gpu.takes(x) and weight.dtype == x.dtype:
        return kernels.rms_norm(x, weight, eps, offset=offset)
    found = None if offset else native.rms_norm(x, weight, eps)
    return rms_norm_ref(x, weight, eps, offset=offset) if found is None else found


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(``rms_norm`` of ``x + residual``, and ``x + residual`` itself, rounded to x's dtype: the new residual).

    Args:
        x, residual: ``[..., n]``
        weight: ``[n]``
    """
    if gpu.takes(x) and x.dtype == residual.dtype == weight.dtype:
        return kernels.add_rms_norm(x, residual, weight, eps, offset=offset)
    if not offset and (found := native.add_rms_norm(x, residual, weight, eps)) is not None:
        return found
    total = x + residual
    return rms_norm_ref(total, weight, eps, offset=offset), total


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
    """Norms x, adds it to the residual and norms the sum: what stands between Gemma's attention and MLP.

    Args:
        x, residual: ``[..., n]``
        first, first_eps: ``[n]``, of x's own norm.
        weight, eps: ``[n]``, of the sum's.
        offset: applies to both norms.

    Returns:
        The norm of the sum, and the sum, both ``[..., n]`` of x's dtype.
    """
    if gpu.takes(x) and x.dtype == residual.dtype == first.dtype == weight.dtype:
        own = (first, first_eps)
        return kernels.add_rms_norm(x, residual, weight, eps, first=own, offset=offset)
    return add_rms_norm(rms_norm(x, first, first_eps, offset=offset), residual, weight, eps, offset=offset)


def rounded_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, group: int, *, offset: bool = False) -> Fp8Rows:
    """``rms_norm`` of ``[T, n]``, rounded to e4m3 with a scale for each ``group`` channels."""
    if gpu.takes(x) and weight.dtype == x.dtype:
        return kernels.rounded_rms_norm(x, None, weight, eps, group, offset=offset)[0]
    return round_rows(rms_norm(x, weight, eps, offset=offset), group)


class ResidualNorm(NamedTuple):
    """Weights of the sum behind a layer's part: its output is added to the residual stream, and the sum is normed."""

    weight: torch.Tensor
    """``[n]``"""
    eps: float
    offset: bool = False
    """Both norms multiply by ``1 + weight``."""
    first: torch.Tensor | None = None
    """``[n]``: an output is normed by it before it is added."""
    first_eps: float = 0.0

    rounds: int | None = None
    """The norm is rounded to e4m3 with a scale for each so many channels; None: it is not."""

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[Activations, torch.Tensor]:
        """(the norm of the sum, the sum), both as x: ``[..., n]``, or where the norm is rounded ``[T, n]``."""
        first = None if self.first is None else (self.first, self.first_eps)
        weights = (self.weight,) if self.first is None else (self.weight, self.first)
        if self.rounds is not None and gpu.takes(x) and all(each.dtype == x.dtype for each in (residual, *weights)):
            return kernels.rounded_rms_norm(x, residual, self.weight, self.eps, self.rounds, first=first, offset=self.offset)
        if first is None:
            normed, total = add_rms_norm(x, residual, self.weight, self.eps, offset=self.offset)
        else:
            normed, total = norm_add_rms_norm(x, residual, *first, self.weight, self.eps, offset=self.offset)
        return self.rounded(normed), total

    def rounded(self, normed: torch.Tensor) -> Activations:
        """Rounds the norm if it is to be rounded."""
        return normed if self.rounds is None else round_rows(normed, self.rounds)
