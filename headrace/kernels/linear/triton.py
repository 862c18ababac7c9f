"""Products of a few rows with a weight: read the weight once, at memory speed. Reference: ``torch.nn.functional.linear``.

One row: each program sums products channel by channel, a few outputs at a time; the lines of A of an adapter are a few more of
them. More rows: the same walk with the matrix units. They take 16 rows at the least, and fewer cost the same: what counts is
that weights go from the memory to the units by way of registers alone, many of them at a time, and that the memory is busy
before the kernel before is complete.
"""

# A kernel's tuples grow.
# mypy: disable-error-code=assignment

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl

from headrace.kernels.linear.triton_matmul import check_factors
from headrace.kernels.lora.reference import Factors
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import announce, options, wait

MAX_ROWS = 32
"""More rows are for a library's matrix product."""
_RUN = tl.constexpr(32)
"""Neighbouring channels that a warp's threads load together, of each of eight lines."""

_X_AHEAD = tl.constexpr(2)
"""Tiles of x loaded ahead; fewer than of the weight, because x is in the cache."""


@dataclasses.dataclass(frozen=True)
class LinearTiling:
    """A program makes ``outputs`` numbers of each row and reads ``channels`` of them at a time.

    With matrix units ``outputs`` is a power of two from 8 on, ``channels`` one from 64 and ``32 * num_warps`` on.
    """

    outputs: int
    channels: int
    num_warps: int
    ahead: int
    """Tiles of the weight loaded ahead of the matrix units; 0: one row, without matrix units."""


_SEVERAL: tuple[tuple[float, float, LinearTiling], ...] = (
    (math.inf, 2048, LinearTiling(16, 512, 4, 4)),
    (4096, math.inf, LinearTiling(16, 128, 2, 8)),
    (math.inf, math.inf, LinearTiling(16, 256, 4, 4)),
)
"""Largest numbers of channels and outputs, and their tiling: the first line counts in which both fit. As measured on an H200
with the products of Qwen3 0.6B, 8B and 30B-A3B, one after the other as in a step."""


def choose_tiling(rows: int, in_features: int, out_features: int) -> LinearTiling:
    """One row: what was fastest of 2 to 16 outputs, 256 to 2048 channels and 2 to 8 warps on an H200. More: by the table."""
    if rows == 1:
        if in_features <= 1024:
            return LinearTiling(4, max(power_of_two(in_features), 16), 2, 0)
        if in_features <= 3072:
            return LinearTiling(4, 2048, 4 if in_features <= 2048 else 8, 0)
        return LinearTiling(2, 1024, 4, 0)
    return next(tiling for most_in, most_out, tiling in _SEVERAL if in_features <= most_in and out_features <= most_out)


@triton.jit
def _finish(result, bias, output, mask, DTYPE: tl.constexpr, BIAS: tl.constexpr):
    """Adds the bias before the product is rounded."""
    if BIAS:
        result += tl.load(bias + output, mask=mask, other=0.0).to(tl.float32)
    return result.to(DTYPE)


@launched
def _single(
    x, weight, bias, y, a, low, places, weight_row: tl.int64, a_place: tl.int64, IN: tl.constexpr, OUT: tl.constexpr,
    WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The first programs multiply by A of the row's adapter in place of the weight: ``WIDTH`` sums, which are not rounded. 0:
    without adapters."""
    announce(PDL)
    ADAPTED: tl.constexpr = (WIDTH + OUTPUTS - 1) // OUTPUTS
    program = tl.program_id(0)
    lines, lines_row, count, of_a = weight, weight_row, OUT, False
    if ADAPTED:
        # No branch: each program waits for the kernel before, whatever it multiplies by.
        of_a = program < ADAPTED
        place = tl.load(places, mask=of_a, other=-1)
        count = tl.where(of_a, tl.where(place >= 0, WIDTH, 0), OUT)
        lines = tl.where(of_a, a + tl.maximum(place, 0) * a_place, weight)
        lines_row = tl.where(of_a, IN, weight_row)
        program -= tl.where(of_a, 0, ADAPTED)
    output = program * OUTPUTS + tl.arange(0, OUTPUTS)
    present = output < count
    channel = tl.arange(0, CHANNELS)
    base = lines + output.to(tl.int64)[:, None] * lines_row
    sums = tl.zeros([OUTPUTS, CHANNELS], tl.float32)
    # Each tile of the weight is loaded while the one before is summed; the first, while the previous kernel still runs.
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
    if ADAPTED:
        tl.store(low + output, result, mask=present & of_a)
        present = present & (not of_a)
    result = _finish(result, bias, output, present, y.dtype.element_ty, BIAS)
    tl.store(y + output, result, mask=present)


@triton.jit
def _places(TILE: tl.constexpr, CHANNELS: tl.constexpr, WARPS: tl.constexpr):
    """Returns the line and the first channel of each run, ``[TILE * CHANNELS / _RUN]``, of ``TILE`` lines (rows of x, or of the
    weight) and ``CHANNELS`` channels in runs of ``_RUN``. Eight lines and a run are loaded by a warp at once, 16 bytes a
    thread, and taken of a factor by a matrix instruction; a warp has separate channels, in which all of its runs follow each
    other."""
    RUNS: tl.constexpr = CHANNELS // (WARPS * _RUN)
    place = tl.arange(0, TILE * CHANNELS // _RUN)
    warp, run = place // 8 % WARPS, place // (8 * WARPS) % RUNS
    return place % 8 + place // (8 * WARPS * RUNS) * 8, (warp * RUNS + run) * _RUN


@triton.jit
def _pieces(part, TILE: tl.constexpr, CHANNELS: tl.constexpr, WARPS: tl.constexpr):
    """``[lines / 8, runs, warp, line of 8, thread, instruction, half, neighbour]``: where everything in a tile is.

    A matrix instruction takes 16 channels, of which a thread has two neighbours in each half. Which channels these are does
    not matter, so long as both factors agree: they are eight neighbours of two instructions, so that what a thread has loaded
    at once are its numbers, and nothing has to change places between the memory and the instruction.
    """
    return tl.reshape(part, (TILE // 8, CHANNELS // (WARPS * _RUN), WARPS, 8, 4, 2, 2, 2))


@triton.jit
def _tile(base, at, start: tl.constexpr, IN: tl.constexpr, CHANNELS: tl.constexpr, POLICY: tl.constexpr):
    """Lines from channel ``start`` on; only the last tile may reach past the end."""
    if start + CHANNELS <= IN:
        return tl.load(base + start, eviction_policy=POLICY)
    return tl.load(base + start, mask=at < IN - start, other=0.0, eviction_policy=POLICY)


@launched(do_not_specialize=["rows"])
def _several(
    x, weight, bias, y, rows, out, x_row: tl.int64, weight_row: tl.int64, IN: tl.constexpr, OUTPUTS: tl.constexpr,
    CHANNELS: tl.constexpr, AHEAD: tl.constexpr, WARPS: tl.constexpr, ROWS_P: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The warps share the channels: each sums up its own with the matrix units, and the sums are added at the end."""
    announce(PDL)
    COUNT: tl.constexpr = (IN + CHANNELS - 1) // CHANNELS
    RUNS: tl.constexpr = CHANNELS // WARPS // _RUN
    first = tl.program_id(0) * OUTPUTS
    within = tl.arange(0, _RUN)[None, :]
    line, run = _places(OUTPUTS, CHANNELS, WARPS)
    # Lines past the end are read as the last one, and not written.
    weight_at = run[:, None] + within
    weights = weight + (tl.minimum(first + line, out - 1).to(tl.int64) * weight_row)[:, None] + weight_at
    line, run = _places(ROWS_P, CHANNELS, WARPS)
    x_at = run[:, None] + within
    factors = x + (tl.minimum(line, rows - 1).to(tl.int64) * x_row)[:, None] + x_at
    parts = ()
    for ahead in tl.static_range(min(AHEAD, COUNT)):
        parts += (_tile(weights, weight_at, ahead * CHANNELS, IN, CHANNELS, "evict_first"),)
    wait(PDL)
    lefts = ()
    for ahead in tl.static_range(min(_X_AHEAD, COUNT)):
        lefts += (_tile(factors, x_at, ahead * CHANNELS, IN, CHANNELS, ""),)
    sums = tl.zeros([WARPS, max(ROWS_P, 16), OUTPUTS], tl.float32)
    # Unrolled: a loop would wait for all loads in flight in each iteration.
    for step in tl.static_range(COUNT):
        if step + AHEAD < COUNT:
            parts += (_tile(weights, weight_at, (step + AHEAD) * CHANNELS, IN, CHANNELS, "evict_first"),)
        if step + _X_AHEAD < COUNT:
            lefts += (_tile(factors, x_at, (step + _X_AHEAD) * CHANNELS, IN, CHANNELS, ""),)
        left = _pieces(lefts[step], ROWS_P, CHANNELS, WARPS)
        if ROWS_P == 8:
            # The instruction has 16 rows: the second half is the first once more.
            left = tl.broadcast_to(left, (2, RUNS, WARPS, 8, 4, 2, 2, 2))
        left = tl.reshape(tl.permute(left, (2, 0, 3, 1, 5, 6, 4, 7)), (WARPS, max(ROWS_P, 16), CHANNELS // WARPS))
        right = _pieces(parts[step], OUTPUTS, CHANNELS, WARPS)
        right = tl.reshape(tl.permute(right, (2, 1, 5, 6, 4, 7, 0, 3)), (WARPS, CHANNELS // WARPS, OUTPUTS))
        sums = tl.dot(left, right, sums, input_precision=PRECISION)
    result = tl.sum(sums, 0)
    row = tl.arange(0, max(ROWS_P, 16))[:, None]
    output = first + tl.arange(0, OUTPUTS)[None, :]
    mask = (row < rows) & (output < out)
    result = _finish(result, bias, output, mask, y.dtype.element_ty, BIAS)
    tl.store(y + row * out + output, result, mask=mask)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    tiling: LinearTiling | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``x W^T + bias`` for a few rows.

    Args:
        x: ``[rows, in]`` of at most ``MAX_ROWS`` rows; last axis contiguous, as of all that follow.
        weight: ``[out, in]`` of x's dtype. Read fast where its rows are multiples of 32 bytes apart.
        bias: ``[out]``
        tiling: None: ``choose_tiling``'s.
        out_dtype: what the product is rounded to; None: x's dtype.

    Returns:
        ``[rows, out]``

    Raises:
        ValueError: a tensor does not fit the others.
    """
    rows, in_features = x.shape
    out_features = weight.shape[0]
    check_factors(x, weight, MAX_ROWS)
    tiling = tiling or choose_tiling(rows, in_features, out_features)
    if rows > 1 and not tiling.ahead:
        raise ValueError(f"{rows} rows take the matrix units: {tiling} has none of their tiles ahead")
    y = torch.empty(rows, out_features, dtype=out_dtype or x.dtype, device=x.device)
    if not y.numel():
        return y
    grid = (cdiv(out_features, tiling.outputs),)
    sizes = {"IN": in_features, "OUTPUTS": tiling.outputs, "CHANNELS": tiling.channels, "BIAS": bias is not None}
    launch = {"num_warps": tiling.num_warps, "num_stages": 1, **options(x.device)}
    tensors = (x, weight, x if bias is None else bias, y)
    if not tiling.ahead:
        _single[grid](*tensors, x, y, x, weight.stride(0), 0, OUT=out_features, WIDTH=0, **sizes, **launch)
    else:
        strides = (x.stride(0), weight.stride(0))
        shape = {"AHEAD": tiling.ahead, "WARPS": tiling.num_warps, "ROWS_P": max(power_of_two(rows), 8)}
        precision = "ieee" if x.dtype == torch.float32 else "tf32"
        _several[grid](*tensors, rows, out_features, *strides, **sizes, **shape, **launch, PRECISION=precision)
    return y


def linear_and_low(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    factors: Factors,
    out_dtype: torch.dtype | None = None,
    tiling: LinearTiling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``linear`` of one row, which is bitwise the same, and A's products of its adapter, in one kernel.

    Args:
        factors: with ``places``, in x's dtype; each place of ``a`` is contiguous.

    Returns:
        ``[1, out]`` and ``LowRank.low``, of one share.

    Raises:
        ValueError: a tensor does not fit the others.
    """
    check_factors(x, weight, 1)
    a, places, in_features, out_features = factors.a, factors.places, x.shape[1], len(weight)
    if places is None or len(places) != 1 or a.shape[2] != in_features or a.dtype != x.dtype or not a[0].is_contiguous():
        raise ValueError(f"a {list(a.shape)} {a.dtype} and places {places} do not fit x, {list(x.shape)} {x.dtype}")
    tiling = tiling or choose_tiling(1, in_features, out_features)
    y = torch.empty(1, out_features, dtype=out_dtype or x.dtype, device=x.device)
    low = torch.empty(1, 1, a.shape[1], dtype=torch.float32, device=x.device)
    _single[(cdiv(a.shape[1], tiling.outputs) + cdiv(out_features, tiling.outputs),)](
        x, weight, x if bias is None else bias, y, a, low, places, weight.stride(0), a.stride(0), IN=in_features,
        OUT=out_features, WIDTH=a.shape[1], OUTPUTS=tiling.outputs, CHANNELS=tiling.channels, BIAS=bias is not None,
        num_warps=tiling.num_warps, num_stages=1, **options(x.device),
    )  # fmt: skip
    return y, low
