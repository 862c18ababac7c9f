"""References of products in FP8, and the weights that they take."""

from __future__ import annotations

from typing import NamedTuple

import torch

GROUP = 128
"""Outputs and inputs of a block."""
E4M3_MAX = 448.0
LEAST_SCALE = 1e-12


class Fp8Weight(NamedTuple):
    codes: torch.Tensor
    """``[N, K]`` float8_e4m3fn"""
    scales: torch.Tensor
    """``[N, 1]`` or, of blocks, ``[ceil(N / tall), K / GROUP]``; float32"""
    one: torch.Tensor
    """1.0, on the weight's device."""
    turns: torch.Tensor
    """Zeros, int32, for each 64 outputs: programs that share a sum count themselves there, and leave zeros behind."""

    @property
    def in_blocks(self) -> bool:
        return len(self.scales) != len(self.codes)

    @property
    def tall(self) -> int:
        """Outputs that share a scale: ``GROUP``, or half as many; 0: none do."""
        outputs, blocks = len(self.codes), len(self.scales)
        return 0 if not self.in_blocks else GROUP if blocks == -(-outputs // GROUP) else GROUP // 2

    @property
    def group(self) -> int:
        """Channels of a row of x that share a scale."""
        return GROUP if self.in_blocks else self.codes.shape[1]


class Fp8Rows(NamedTuple):
    """Rows ``[T, K]`` rounded to e4m3, as ``quantize_rows_ref`` rounds them."""

    codes: torch.Tensor
    """``[T, K]`` float8_e4m3fn. Rows of any content may follow, as many as in ``scales``."""
    scales: torch.Tensor
    """``[T, K / group]`` float32; on a GPU, with a contiguous first axis."""
    rows: int
    """T"""
    dtype: torch.dtype
    """Dtype of the rows before."""

    def floats(self) -> torch.Tensor:
        """Returns the rounded rows as floats, ``[T, K]`` in ``dtype``."""
        codes, scales = self.codes[: self.rows].float(), self.scales[: self.rows]
        groups = codes.view(self.rows, scales.shape[1], -1) * scales.unsqueeze(-1)
        return groups.view(codes.shape).to(self.dtype)


Activations = torch.Tensor | Fp8Rows
"""Rows that a matrix multiplies: floats, or rounded already."""


def quantize_rows_ref(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds ``[T, K]`` to e4m3 with a scale of ``absmax / 448`` for each row and ``group`` channels, a divisor of K.

    Returns:
        codes ``[T, K]`` float8_e4m3fn; scales ``[T, K / group]`` float32.
    """
    wide = x.float().view(len(x), x.shape[1] // group, group)
    scales = (wide.abs().amax(-1) / E4M3_MAX).clamp_min(LEAST_SCALE)
    codes = (wide / scales.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return codes.view(x.shape).to(torch.float8_e4m3fn), scales


def round_rows_ref(x: torch.Tensor, group: int) -> Fp8Rows:
    """``quantize_rows_ref`` of ``[T, K]``."""
    return Fp8Rows(*quantize_rows_ref(x, group), len(x), x.dtype)


def fp8_linear_ref(x: Fp8Rows, weight: Fp8Weight, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """The product in float32, rounded once."""
    rows = x.codes.float() * x.scales.repeat_interleave(weight.group, 1)
    y = rows @ dequantize(weight).t()
    return (y if bias is None else y + bias.float()).to(out_dtype)


def dequantize(weight: Fp8Weight) -> torch.Tensor:
    """``[N, K]`` float32"""
    scales = weight.scales
    if weight.in_blocks:
        scales = scales.repeat_interleave(weight.tall, 0)[: len(weight.codes)].repeat_interleave(GROUP, 1)
    return weight.codes.float() * scales
