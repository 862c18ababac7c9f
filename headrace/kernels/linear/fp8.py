"""Products with weights in FP8 (e4m3). Activations are rounded to e4m3 too, in the same way for any number of rows.

Weights have a scale for each output, or for each block of ``GROUP`` outputs and inputs. In the first case a token's row has one
scale, in the second a scale for each ``GROUP`` channels, as in DeepSeek-V3 (2024). Sums are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import ScalingType, scaled_mm

from headrace.kernels import gpu
from headrace.kernels.linear.fp8_reference import Fp8Weight, fp8_linear_ref, quantize_rows_ref

if TYPE_CHECKING:
    from headrace.kernels.linear import triton_fp8 as kernels
else:
    kernels = gpu.Late("headrace.kernels.linear.triton_fp8")

FEW_ROWS = 8
"""Up to this many rows, the Triton kernel for blocks beats cuBLASLt's. On an H200, the four products of a layer of Qwen3-8B
take 78 and 89 us at 8 rows, 86 and 87 at 16, activations and their rounding included."""
UNSCALED_ROWS = 256
"""Up to this many rows, cuBLASLt's product without scales and a kernel that applies them beat its product with a scale for each
row and output: 81 and 103 us at 64 rows, 122 and 120 at 256."""
EXACT_ROWS = 64
"""Up to this many rows, sums of more than 14 bits take no longer: 64 and 64 us at 64 rows, 68 and 70 at 128."""


def fp8_linear(
    x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``x W^T + bias`` with x rounded as ``quantize_rows_ref`` does.

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
    codes, scales = kernels.quantize_rows(x, weight.group, 4 if weight.in_blocks and not few else 1)
    if weight.in_blocks and few:
        return kernels.blocks(codes, scales, weight, bias, dtype)
    if weight.in_blocks:
        # Rounded once: a bias is added before.
        wide = dtype if dtype == torch.bfloat16 and bias is None else torch.float32
        recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        y = scaled_mm(codes, weight_t, scales, recipes[0], weight.scales.t(), recipes[1], output_dtype=wide)[:rows]
        return (y if bias is None else y + bias).to(dtype)
    if rows <= UNSCALED_ROWS or dtype != torch.bfloat16:
        fast = rows > EXACT_ROWS
        y = torch._scaled_mm(codes, weight_t, weight.one, weight.one, out_dtype=torch.float32, use_fast_accum=fast)
        return kernels.scale(y, scales, weight.scales, bias, dtype)
    return torch._scaled_mm(codes, weight_t, scales, weight.scales.t(), bias=bias, out_dtype=dtype, use_fast_accum=True)
