"""Products with weights in FP8 (e4m3). Activations are rounded to e4m3 too, in the same way for any number of rows.

Weights have a scale for each output, or for each block of ``GROUP`` outputs and inputs. In the first case a token's row has one
scale, in the second a scale for each ``GROUP`` channels, as in DeepSeek-V3 (2024). Sums are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import ScalingType, scaled_mm

from headrace.kernels import gpu, support
from headrace.kernels.linear import cuda_invariant, cuda_single, cuda_wide
from headrace.kernels.linear.fp8_reference import Activations, Fp8Rows, Fp8Weight, fp8_linear_ref, round_rows_ref
from headrace.kernels.linear.fp8_tilings import INVARIANT, FewTiling, Library, SingleTiling, WideTiling, choose

if TYPE_CHECKING:
    from headrace.kernels.linear import triton_fp8 as kernels
    from headrace.kernels.linear import triton_fp8_few as few_kernels
    from headrace.kernels.linear import triton_fp8_wide as wide_kernels
else:
    kernels = gpu.Late("headrace.kernels.linear.triton_fp8")
    few_kernels = gpu.Late("headrace.kernels.linear.triton_fp8_few")
    wide_kernels = gpu.Late("headrace.kernels.linear.triton_fp8_wide")

EXACT_ROWS = 64
"""Up to this many rows, sums of more than 14 bits take no longer: 64 and 64 us at 64 rows, 68 and 70 at 128."""


def round_rows(x: torch.Tensor, group: int) -> Fp8Rows:
    """Rounds ``[T, K]``, whose last axis is contiguous, to e4m3 with a scale for each ``group`` channels."""
    return kernels.quantize_rows(x, group) if gpu.takes(x) else round_rows_ref(x, group)


def fp8_linear(
    x: Activations,
    weight: Fp8Weight,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """``x W^T + bias``.

    Args:
        x: ``[T, K]``, rounded with a scale for each ``weight.group`` channels; or floats, which are rounded so.
        weight: on a GPU, of multiples of 16 outputs and inputs.
        bias: ``[N]``
        out_dtype: dtype of the result; None: that of the rows before they were rounded.
        batch_invariant: a row comes out bitwise the same in any batch; on Hopper alone.
    """
    dtype = out_dtype or x.dtype
    if not batch_invariant and (y := cuda_single.fp8_linear(x, weight, bias, dtype)) is not None:
        return y
    if isinstance(x, torch.Tensor):
        return fp8_linear(round_rows(x, weight.group), weight, bias, dtype, batch_invariant=batch_invariant)
    rows = x.rows
    if not rows:
        return x.scales.new_empty(0, len(weight.codes), dtype=dtype)
    if not gpu.takes(x.codes):
        return fp8_linear_ref(x, weight, bias, dtype)
    if not weight.in_blocks:
        choose_cuda = cuda_invariant.choose_fp8 if batch_invariant else cuda_wide.choose
        tiling = choose_cuda(x.codes[:rows], weight.codes)
        if tiling is not None:
            return cuda_wide.fp8_linear(x, weight, bias, dtype, tiling)
    choice = INVARIANT if batch_invariant else choose(rows, weight, hopper=support.is_hopper(x.codes.device))
    if isinstance(choice, WideTiling):
        return wide_kernels.wide(x, weight, bias, dtype, choice)
    if isinstance(choice, FewTiling | SingleTiling):
        return few_kernels.few(x, weight, bias, dtype, choice)
    weight_t = weight.codes.t()
    if choice == Library.BY_BLOCK:
        # Rounded once: a bias is added before.
        sums = dtype if dtype == torch.bfloat16 and bias is None else torch.float32
        recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        y = scaled_mm(x.codes, weight_t, x.scales, recipes[0], weight.scales.t(), recipes[1], output_dtype=sums)[:rows]
        return (y if bias is None else y + bias).to(dtype)
    codes, scales = x.codes[:rows], x.scales[:rows]
    if choice == Library.UNSCALED or dtype != torch.bfloat16:
        fast = rows > EXACT_ROWS
        y = torch._scaled_mm(codes, weight_t, weight.one, weight.one, out_dtype=torch.float32, use_fast_accum=fast)
        return kernels.scale(y, scales, weight.scales, bias, dtype)
    return torch._scaled_mm(codes, weight_t, scales, weight.scales.t(), bias=bias, out_dtype=dtype, use_fast_accum=True)


def fp8_linear_gated(x: Fp8Rows, weight: Fp8Weight) -> torch.Tensor | None:
    """``silu(gate) * up`` of the halves of ``fp8_linear``: ``[T, K] -> [T, N / 2]``; None: no kernel computes both faster."""
    return cuda_single.fp8_linear(x, weight, None, x.dtype, gated=True)


def streams(weight: Fp8Weight) -> bool:
    """Whether the product of one row fills the shared memory of all multiprocessors with the weight."""
    return cuda_single.choose(weight) is not None
