"""PyTorch's packed int8 product for the CPU: one scale for each output."""

from __future__ import annotations

import torch

from headrace.quant.packed import PackedLinear


def misfit(in_features: int, out_features: int) -> str | None:
    """Why the kernel cannot hold a matrix; None: it can. It reads inputs by sixteens, without looking."""
    return f"{in_features} inputs are not a multiple of 16" if in_features % 16 else None


class Int8Linear(PackedLinear):
    """``weight = scale * code``, code -127 to 127, rounded from a float matrix."""

    format = "int8, a scale for each output"
    codes: torch.Tensor
    """``[N, K]`` int8"""
    scales: torch.Tensor
    """``[N]``"""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        """Args: weight: ``[N, K]`` float. dtype: of the scales and of the activations."""
        super().__init__(weight.shape[1], weight.shape[0], bias)
        weight = weight.float()
        scales = (weight.abs().amax(1) / 127).to(dtype)
        # The codes are chosen for the scale that is kept, so its rounding costs nothing.
        inverse = torch.where(scales > 0, 1 / scales.float(), torch.zeros_like(scales, dtype=torch.float32))
        self.register_buffer("codes", (weight * inverse[:, None]).round_().clamp_(-127, 127).to(torch.int8))
        self.register_buffer("scales", scales)

    def dequantize(self) -> torch.Tensor:
        return self.codes.float() * self.scales.float()[:, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features] -> [..., out_features]``"""
        rows = x.reshape(-1, self.in_features).contiguous()
        y = torch.ops.aten._weight_int8pack_mm(rows, self.codes, self.scales)
        return self.finish(y.view(*x.shape[:-1], self.out_features))
