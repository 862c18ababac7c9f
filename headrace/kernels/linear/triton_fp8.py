"""Rounds rows to FP8, and applies scales to sums. References: ``headrace.kernels.linear.fp8_reference``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.kv_cache.triton_fp8 import as_bytes, mode, quantized, scale_of
from headrace.kernels.linear.fp8_reference import Fp8Rows
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options

_BLOCK = 1024
"""Channels that a program rounds, where groups are narrower, or a row is long."""
_LONG = 8192
"""Channels of a row from which several programs round it."""


@triton.jit
def store_rounded(
    value, codes, scales, scale_column: tl.int64, row, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    MODE: tl.constexpr
):  # fmt: skip
    """Rounds ``BLOCK`` channels of a row from ``first`` on, which are zero past the end: whole groups of ``GROUP`` channels.

    ``row`` is 64 bits wide. Codes are bytes ``[rows, WIDTH]``, scales have a contiguous axis of rows.
    """
    wide = value.to(tl.float32)
    channel = first + tl.arange(0, BLOCK)
    if GROUP == WIDTH:
        scale = scale_of(wide, 0)
        tl.store(scales + row, scale)
        stored = quantized(wide, scale, MODE)
    else:
        GROUPS: tl.constexpr = BLOCK // GROUP
        parts = tl.reshape(wide, (GROUPS, GROUP))
        scale = scale_of(parts, 1)
        group = first // GROUP + tl.arange(0, GROUPS)
        tl.store(scales + group * scale_column + row, scale, mask=group < WIDTH // GROUP)
        stored = tl.reshape(quantized(parts, scale[:, None], MODE), (BLOCK,))
    tl.store(codes + row * WIDTH + channel, stored, mask=channel < WIDTH)


@launched
def _quantize(
    x, codes, scales, scale_column: tl.int64, x_row: tl.int64, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    MODE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Channels of one row."""
    begin(PDL)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    channel = first + tl.arange(0, BLOCK)
    value = tl.load(x + row * x_row + channel, mask=channel < WIDTH, other=0.0)
    store_rounded(value, codes, scales, scale_column, row, first, WIDTH, BLOCK, GROUP, MODE)


@launched
def _quantize_long(
    x, codes, scales, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One row with one scale: each program looks at all of it, and rounds a block."""
    begin(PDL)
    first = tl.program_id(0) * BLOCK
    channel, every = first + tl.arange(0, BLOCK), tl.arange(0, WIDTH_P)
    value = tl.load(x + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    scale = scale_of(tl.load(x + every, mask=every < WIDTH, other=0.0).to(tl.float32), 0)
    if tl.program_id(0) == 0:
        tl.store(scales, scale)
    tl.store(codes + channel, quantized(value, scale, MODE), mask=channel < WIDTH)


def block_of(width: int, group: int) -> int:
    """Channels that a program rounds: a power of two that holds the row, or some of its groups."""
    block: int = power_of_two(width)
    return block if group == width else min(block, _BLOCK)


def empty_rows(rows: int, width: int, group: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales as ``quantize_rows`` gives them, not filled."""
    # cuBLASLt's blocks are of multiples of four rows.
    count = cdiv(rows, 4) * 4
    codes = torch.empty(count, width, dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty(width // group, count, dtype=torch.float32, device=device).t()


def quantize_rows(x: torch.Tensor, group: int) -> Fp8Rows:
    """Kernel version of ``headrace.kernels.linear.fp8_reference.quantize_rows_ref``; the last axis is contiguous.

    Args:
        group: the row's width, or a power of two.
    """
    rows, width = x.shape
    codes, scales = empty_rows(rows, width, group, x.device)
    if rows == 1 and group == width >= _LONG:
        _quantize_long[(cdiv(width, _BLOCK),)](
            x, as_bytes(codes), scales, WIDTH=width, WIDTH_P=power_of_two(width), BLOCK=_BLOCK, MODE=mode(x.device),
            num_warps=16, **options(x.device),
        )  # fmt: skip
    elif rows:
        block = block_of(width, group)
        _quantize[(rows, cdiv(width, block))](
            x, as_bytes(codes), scales, scales.stride(1), x.stride(0), WIDTH=width, BLOCK=block, GROUP=group,
            MODE=mode(x.device), num_warps=min(max(block // 256, 1), 16), **options(x.device),
        )  # fmt: skip
    return Fp8Rows(codes, scales, rows, x.dtype)


@launched
def _scale(
    x, rows_scale, columns_scale, bias, y, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A block of one row's channels."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < WIDTH
    factor = tl.load(columns_scale + channel, mask=mask, other=0.0)
    if BIAS:
        more = tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
    begin(PDL)
    value = tl.load(x + row * WIDTH + channel, mask=mask, other=0.0) * (tl.load(rows_scale + row) * factor)
    if BIAS:
        value += more
    tl.store(y + row * WIDTH + channel, value.to(y.dtype.element_ty), mask=mask)


def scale(
    x: torch.Tensor, rows_scale: torch.Tensor, columns_scale: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """``x * rows_scale * columns_scale + bias``: ``[T, N]`` float32 by ``[T, 1]`` and ``[N, 1]``, rounded once."""
    rows, width = x.shape
    y = torch.empty(rows, width, dtype=out_dtype, device=x.device)
    if y.numel():
        block = min(1024, power_of_two(width))
        _scale[(rows, cdiv(width, block))](
            x, rows_scale, columns_scale, x if bias is None else bias, y, WIDTH=width, BLOCK=block, BIAS=bias is not None,
            num_warps=4, **options(x.device),
        )  # fmt: skip
    return y
