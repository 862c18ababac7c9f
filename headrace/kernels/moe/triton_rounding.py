"""Rounding of the rows that experts multiply. Reference: ``headrace.kernels.moe.codes``."""

# A kernel's arguments have no types of Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton.language as tl

from headrace.kernels.kv_cache.triton_fp8 import mode, quantized, scale_of
from headrace.kernels.moe.codes import ExpertCodes
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options

_ROUNDED, _SPREAD = 2048, 1024
"""Numbers that a program rounds, and groups of rows up to which it rounds one of them."""


@launched(do_not_specialize=["count", "column"])
def _round_rows(
    x,
    given,
    codes,
    scales,
    count,
    x_row: tl.int64,
    column: tl.int64,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_P: tl.constexpr,
    GROUPS: tl.constexpr,
    SEVERAL: tl.constexpr,
    STATIC: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Several groups of rows, of ``count``."""
    begin(PDL)
    item = tl.program_id(0).to(tl.int64) * SEVERAL + tl.arange(0, SEVERAL)
    row, group = item // GROUPS, (item % GROUPS).to(tl.int32)
    within = tl.arange(0, GROUP_P)
    channel = group[:, None] * GROUP + within[None, :]
    mask = (item < count)[:, None] & (within < GROUP)[None, :] & (channel < IN)
    value = tl.load(x + row[:, None] * x_row + channel, mask=mask, other=0.0).to(tl.float32)
    if STATIC:
        scale = tl.load(given + group * 0)
    else:
        scale = scale_of(value, 1)
        tl.store(scales + group * column + row, scale, mask=item < count)
    rounded = quantized(value, tl.broadcast_to(scale[:, None], (SEVERAL, GROUP_P)), MODE)
    tl.store(codes + row[:, None] * IN + channel, rounded, mask=mask)


def round_rows(x: torch.Tensor, held: ExpertCodes) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernel version of ``ExpertCodes.round_rows``.

    Returns:
        codes ``[T, K]`` uint8 that hold e4m3; scales ``[groups, T]``, or the given one.
    """
    rows, width = x.shape
    group = min(held.x_group or width, width)
    groups, group_p = cdiv(width, group), power_of_two(group)
    count = rows * groups
    codes = torch.empty(rows, width, dtype=torch.uint8, device=x.device)
    static = held.x_scale is not None
    scales = held.x_scale if held.x_scale is not None else torch.empty(groups, rows, dtype=torch.float32, device=x.device)
    # Few rows are spread over all processors; many are more numbers at a time.
    several = max(_ROUNDED // group_p, 1) if count > _SPREAD else 1
    _round_rows[(cdiv(count, several),)](
        x, scales, codes, scales, count, x.stride(0), rows, IN=width, GROUP=group, GROUP_P=group_p, GROUPS=groups,
        SEVERAL=several, STATIC=static, MODE=mode(x.device), num_warps=min(max(several * group_p // 512, 1), 8),
        **options(x.device),
    )  # fmt: skip
    return codes, scales
