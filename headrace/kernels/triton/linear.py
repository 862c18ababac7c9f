"""Products of a few rows with a weight: read the weight once, at the speed of the memory. Twin: ``torch.nn.functional.linear``.

One row: each program sums products channel by channel, a few outputs at a time. More rows: the same walk with the matrix
units, which take 16 rows at the least, so that fewer cost the same.
"""

# A kernel's arguments have no types of Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from headrace.kernels.triton.pdl import announce, begin, options, wait

MAX_ROWS = 16
"""More rows are for a library's matrix product."""


@dataclasses.dataclass(frozen=True)
class LinearTiling:
    """A program makes ``outputs`` numbers of each row and reads ``channels`` of them at a time."""

    outputs: int
    channels: int
    num_warps: int
    num_stages: int


def choose_tiling(rows: int, in_features: int) -> LinearTiling:
    """One row: what was fastest of 2 to 16 outputs, 256 to 2048 channels and 2 to 8 warps on an H200."""
    if rows == 1:
        if in_features <= 1024:
            return LinearTiling(4, max(triton.next_power_of_2(in_features), 16), 2, 1)
        if in_features <= 3072:
            return LinearTiling(4, 2048, 4 if in_features <= 2048 else 8, 1)
        return LinearTiling(2, 1024, 4, 1)
    return LinearTiling(16, min(256, max(triton.next_power_of_2(in_features), 16)), 4, 4)


@triton.jit
def _finish(result, bias, residual, place, output, mask, DTYPE: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr):
    """Adds the bias before the product is rounded and the residual after it, as the steps one by one would."""
    if BIAS:
        result += tl.load(bias + output, mask=mask, other=0.0).to(tl.float32)
    result = result.to(DTYPE)
    if ADD:
        added = tl.load(residual + place, mask=mask, other=0.0)
        result = (result.to(tl.float32) + added.to(tl.float32)).to(DTYPE)
    return result


@triton.jit
def _single(
    x,
    weight,
    bias,
    residual,
    y,
    weight_row: tl.int64,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    announce(PDL)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    present = output < OUT
    channel = tl.arange(0, CHANNELS)
    base = weight + output.to(tl.int64)[:, None] * weight_row
    sums = tl.zeros([OUTPUTS, CHANNELS], tl.float32)
    # A tile of the weight is on its way while the one before is summed up; the first, while the last kernel still runs.
    part = tl.load(base + channel[None, :], mask=present[:, None] & (channel < IN)[None, :], other=0.0)
    wait(PDL)
    for start in tl.static_range(0, IN, CHANNELS):
        inside = start + channel
        factor = tl.load(x + inside, mask=inside < IN, other=0.0).to(tl.float32)
        here = part
        if start + CHANNELS < IN:
            ahead = inside + CHANNELS
            part = tl.load(base + ahead[None, :], mask=present[:, None] & (ahead < IN)[None, :], other=0.0)
        sums += here.to(tl.float32) * factor[None, :]
    result = tl.sum(sums, 1)
    result = _finish(result, bias, residual, output, output, present, y.dtype.element_ty, BIAS, ADD)
    tl.store(y + output, result, mask=present)


@triton.jit(do_not_specialize=["rows"])
def _several(
    x,
    weight,
    bias,
    residual,
    y,
    rows,
    x_row: tl.int64,
    residual_row: tl.int64,
    weight_row: tl.int64,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS_P: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    present = output < OUT
    channel = tl.arange(0, CHANNELS)
    row = tl.arange(0, ROWS_P)
    x_base = x + row[:, None] * x_row
    base = weight + output.to(tl.int64)[None, :] * weight_row
    sums = tl.zeros([ROWS_P, OUTPUTS], tl.float32)
    for start in range(0, IN, CHANNELS):
        inside = start + channel
        part = tl.load(base + inside[:, None], mask=present[None, :] & (inside < IN)[:, None], other=0.0)
        factor = tl.load(x_base + inside[None, :], mask=(row < rows)[:, None] & (inside < IN)[None, :], other=0.0)
        sums = tl.dot(factor, part, sums, input_precision=PRECISION)
    mask = (row < rows)[:, None] & present[None, :]
    place = row[:, None] * residual_row + output[None, :]
    sums = _finish(sums, bias, residual, place, output[None, :], mask, y.dtype.element_ty, BIAS, ADD)
    tl.store(y + row[:, None] * OUT + output[None, :], sums, mask=mask)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    tiling: LinearTiling | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``x W^T + bias``, and to that ``+ residual``.

    Args:
        x: ``[rows, in]`` of at most ``MAX_ROWS`` rows; last axis contiguous, as of all that follow.
        weight: ``[out, in]`` of x's dtype.
        bias: ``[out]``
        residual: ``[rows, out]`` of x's dtype.
        out_dtype: what the product is rounded to; None: x's dtype.

    Returns:
        ``[rows, out]``

    Raises:
        ValueError: a tensor does not fit the others.
    """
    rows, in_features = x.shape
    out_features = weight.shape[0]
    if rows > MAX_ROWS or weight.shape != (out_features, in_features) or weight.dtype != x.dtype:
        raise ValueError(f"{list(weight.shape)} {weight.dtype} does not fit x, {list(x.shape)} {x.dtype}")
    if x.stride(1) != 1 or weight.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError("the last axes of x, weight and residual must be contiguous")
    if residual is not None and (residual.shape != (rows, out_features) or residual.dtype != x.dtype):
        raise ValueError(
            f"the residual must be [{rows}, {out_features}] {x.dtype}, not {list(residual.shape)} {residual.dtype}"
        )
    y = torch.empty(rows, out_features, dtype=out_dtype or x.dtype, device=x.device)
    if not y.numel():
        return y
    tiling = tiling or choose_tiling(rows, in_features)
    grid = (triton.cdiv(out_features, tiling.outputs),)
    sizes = {"IN": in_features, "OUT": out_features, "OUTPUTS": tiling.outputs, "CHANNELS": tiling.channels}
    flags = {"BIAS": bias is not None, "ADD": residual is not None}
    launch = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages, **options(x.device)}
    tensors = (x, weight, x if bias is None else bias, x if residual is None else residual, y)
    if rows == 1:
        _single[grid](*tensors, weight.stride(0), **sizes, **flags, **launch)
    else:
        strides = (x.stride(0), 0 if residual is None else residual.stride(0), weight.stride(0))
        precision = "ieee" if x.dtype == torch.float32 else "tf32"
        _several[grid](*tensors, rows, *strides, **sizes, **flags, **launch, ROWS_P=16, PRECISION=precision)
    return y
