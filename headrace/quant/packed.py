"""PackedLinear: what every number format of a Linear has in common."""

from __future__ import annotations

import torch
from torch import nn


class PackedLinear(nn.Module):
    """Takes the place of a ``Linear`` and holds no parameter ``weight``.

    ``out_dtype`` is the dtype of the result; None: the input's.
    """

    format: str
    """How the weights are held, for reports."""

    def __init__(self, in_features: int, out_features: int, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.out_dtype: torch.dtype | None = None
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def dequantize(self) -> torch.Tensor:
        """The weights that this module multiplies by, ``[out_features, in_features]`` float32."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as they are held."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        """Adds the bias, and converts if another dtype was asked for."""
        if self.bias is not None:
            y = y + self.bias
        return y if self.out_dtype is None else y.to(self.out_dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.format}"
