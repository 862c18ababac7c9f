"""PackedExperts: the matrices of experts as the compiled kernels for CPUs multiply them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from headrace.kernels.linear.native import packed_linear
from headrace.kernels.native.library import DTYPES


@dataclasses.dataclass(frozen=True)
class PackedExperts:
    """Stacked matrices ``[E, N, K]``."""

    matmul: Callable[..., None]
    """The function of ``NativeKernels``."""
    packed: torch.Tensor
    """``[E, ceil(N / 16), K / 32, bytes of a group]`` uint8, contiguous"""
    outputs: int
    """N"""
    code: int
    """The number format, as the kernels take it."""
    order: torch.Tensor | None = None
    """``[E, K]`` int64: the input at each place; None: they are in order."""

    bias: torch.Tensor | None = None
    """``[E, N]``"""

    def product(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """``x W^T + b`` ``[T, N]`` of one expert, in x's dtype. ``x``: ``[T, K]``."""
        if x.dtype not in DTYPES:
            return self.product(expert, x.float()).to(x.dtype)
        x = x.contiguous() if self.order is None else x.index_select(1, self.order[expert])
        own = None if self.bias is None else self.bias[expert].float()
        address = None if own is None else own.data_ptr()
        weights, groups = self.packed[expert].data_ptr(), self.packed.shape[2]
        return packed_linear(self.matmul, x, weights, address, self.outputs, groups, self.code, x.dtype)
