"""Products with weights in FP8 (e4m3). Activations are rounded to e4m3 too, in the same way for any number of rows.

Weights have a scale for each output, or for each block of ``GROUP`` outputs and inputs. In the first case a token's row has one
scale, in the second a scale for each ``GROUP`` channels, as in DeepSeek-V3 (2024). Sums are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import ScalingType, scaled_mm

from headrace.kernels import gpu

if TYPE_CHECKING:
    from headrace.kernels.linear import triton_fp8 as kernels
else:
    kernels = gpu.Late("headrace.kernels.linear.triton_fp8")

GROUP = 128
"""Outputs and inputs of a block."""
E4M3_MAX = 448.0
LEAST_SCALE = 1e-12

FEW_ROWS = 8
"""Up to this many rows, the Triton kernel for blocks beats cuBLASLt's. On an H200, the four products of a layer of Qwen3-8B
take 78 and 89 us at 8 rows, 86 and 87 at 16, activations and their rounding included."""
UNSCALED_ROWS = 256
"""Up to this many rows, cuBLASLt's product without scales and a kernel that applies them beat its product with a scale for each
row and output: 81 and 103 us at 64 rows, 122 and 120 at 256."""

EXACT_ROWS = 64
"""Up to this many rows, sums of more than 14 bits take no longer: 64 and 64 us at 64 rows, 68 and 70 at 128."""


class Fp8Weight(NamedTuple):
    codes: torch.Tensor
    """``[N, K]`` float8_e4m3fn"""
    scales: torch.Tensor
    """``[N, 1]`` or, of blocks, ``[N / GROUP, K / GROUP]``; float32"""
    one: torch.Tensor
    """1.0, on the weight's device."""

    @property
    def in_blocks(self) -> bool:
        return len(self.scales) != len(self.codes)

    @property
    def group(self) -> int:
        """Channels of a row of x that share a scale."""
        return GROUP if self.in_blocks else self.codes.shape[1]


def quantize_rows(x: torch.Tensor, group: int, multiple: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds ``[T, K]`` to e4m3 with a scale of ``absmax / 448`` for each row and ``group`` channels, a divisor of K.

    Args:
        multiple: on a GPU, rows of any content follow until their number is a multiple of this.

    Returns:
        codes ``[T, K]`` float8_e4m3fn; scales ``[T, K / group]`` float32, on a GPU with a contiguous first axis.
    """
    if gpu.takes(x):
        return kernels.quantize_rows(x, group, multiple)
    return quantize_rows_ref(x, group)


def quantize_rows_ref(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float().view(len(x), x.shape[1] // group, group)
    scales = (wide.abs().amax(-1) / E4M3_MAX).clamp_min(LEAST_SCALE)
    codes = (wide / scales.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return codes.view(x.shape).to(torch.float8_e4m3fn), scales


def fp8_linear(
    x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``x W^T + bias`` with x rounded by ``quantize_rows``.

    Args:
        x: ``[T, K]``, last axis contiguous.
        weight: on a GPU, of multiples of 16 outputs and inputs.
        bias: ``[N]``
        out_dtype: dtype of the result; None: x's.
    """
    dtype, rows = out_dtype or x.dtype, len(x)
    if not rows:
        return x.new_empty(0, len(weight.codes), dtype=dtype)
    if not gpu.takes(x):
        return fp8_linear_ref(*quantize_rows_ref(x, weight.group), weight, bias, dtype)
    weight_t, few = weight.codes.t(), rows <= FEW_ROWS
    # cuBLASLt's blocks are of multiples of four rows.
    codes, scales = quantize_rows(x, weight.group, 4 if weight.in_blocks and not few else 1)
    if weight.in_blocks and few:
        return kernels.blocks(codes, scales, weight, bias, dtype)
    if weight.in_blocks:
        recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        y = scaled_mm(codes, weight_t, scales, recipes[0], weight.scales.t(), recipes[1], output_dtype=torch.bfloat16)[:rows]
    elif rows <= UNSCALED_ROWS or dtype != torch.bfloat16:
        fast = rows > EXACT_ROWS
        y = torch._scaled_mm(codes, weight_t, weight.one, weight.one, out_dtype=torch.float32, use_fast_accum=fast)
        return kernels.scale(y, scales, weight.scales, bias, dtype)
    else:
        y = torch._scaled_mm(codes, weight_t, scales, weight.scales.t(), out_dtype=dtype, use_fast_accum=True)
    return (y if bias is None else y + bias).to(dtype)


def fp8_linear_ref(
    codes: torch.Tensor, scales: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """The product of rows that are rounded already."""
    x = codes.float() * scales.repeat_interleave(weight.group, 1)
    y = x @ dequantize(weight).t()
    return (y if bias is None else y + bias.float()).to(out_dtype)


def dequantize(weight: Fp8Weight) -> torch.Tensor:
    """``[N, K]`` float32"""
    scales = weight.scales
    if weight.in_blocks:
        scales = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return weight.codes.float() * scales
