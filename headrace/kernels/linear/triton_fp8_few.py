"""Products of a few rows with a weight in FP8: read the weight once, at memory speed. References:
``headrace.kernels.linear.fp8_reference``.

Weights go from the memory to the matrix units by way of registers, many of them at a time, as in
``headrace.kernels.linear.triton``. Numbers of e4m3 are exact in float16, and so are their products in float32.
"""

# A kernel's arguments have no types of Python's, and its tuples grow.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, disable-error-code=assignment

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.kv_cache.triton_fp8 import as_bytes, gain, mode, to_half
from headrace.kernels.linear.fp8_reference import GROUP, Fp8Rows, Fp8Weight
from headrace.kernels.linear.fp8_tilings import FEW_ROWS, FewTiling, SingleTiling
from headrace.kernels.support import cdiv
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import announce, options, wait

_GROUP = tl.constexpr(GROUP)
_RUN = tl.constexpr(64)
"""Neighbouring channels that four threads load together, 16 bytes each."""
_X_AHEAD = tl.constexpr(2)
"""Tiles of x loaded ahead; fewer than of the weight, because x is in the cache."""


@triton.jit
def _places(TILE: tl.constexpr, WARPS: tl.constexpr):
    """Line and first channel of each run of a tile of ``TILE`` lines and ``WARPS * GROUP`` channels, ``[TILE * WARPS * RUNS]``.

    Eight lines and a run are what a warp loads at once; a warp has a group of its own.
    """
    RUNS: tl.constexpr = _GROUP // _RUN
    place = tl.arange(0, TILE * WARPS * RUNS)
    warp, run = place // 8 % WARPS, place // (8 * WARPS) % RUNS
    return place % 8 + place // (8 * WARPS * RUNS) * 8, warp * _GROUP + run * _RUN


@triton.jit
def _pieces(part, TILE: tl.constexpr, WARPS: tl.constexpr):
    """``[lines / 8, runs, warp, line of 8, thread, pair of instructions, half, neighbour]``: where everything in a tile is.

    Triton gives a thread four neighbours of each half of a factor that comes from bytes, for two instructions.
    """
    return tl.reshape(part, (TILE // 8, _GROUP // _RUN, WARPS, 8, 4, _RUN // 32, 2, 4))


@triton.jit
def _tile(base, at, start: tl.constexpr, IN: tl.constexpr, CHANNELS: tl.constexpr, POLICY: tl.constexpr):
    """Lines from channel ``start`` on; only the last tile may reach past the end."""
    if start + CHANNELS <= IN:
        return tl.load(base + start, eviction_policy=POLICY)
    return tl.load(base + start, mask=at < IN - start, other=0, eviction_policy=POLICY)


@launched(do_not_specialize=["rows"])
def _fp8_few(
    x,
    x_scales,
    weight,
    scales,
    bias,
    y,
    rows,
    out,
    scale_column: tl.int64,
    IN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    AHEAD: tl.constexpr,
    WARPS: tl.constexpr,
    ROWS_P: tl.constexpr,
    BLOCKS: tl.constexpr,
    BIAS: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each warp sums up groups of its own with the matrix units, and the sums are added at the end.

    With BLOCKS, that many outputs share a scale. Those of a program do, and each group's sum is scaled before it is added.
    """
    announce(PDL)
    CHANNELS: tl.constexpr = WARPS * _GROUP
    COUNT: tl.constexpr = (IN + CHANNELS - 1) // CHANNELS
    GROUPS: tl.constexpr = (IN + _GROUP - 1) // _GROUP
    RUNS: tl.constexpr = _GROUP // _RUN
    first = tl.program_id(0) * OUTPUTS
    within = tl.arange(0, _RUN)[None, :]
    line, run = _places(OUTPUTS, WARPS)
    # Lines past the end are read as the last one, and not written.
    weight_at = run[:, None] + within
    weights = weight + (tl.minimum(first + line, out - 1).to(tl.int64) * IN)[:, None] + weight_at
    line, run = _places(ROWS_P, WARPS)
    x_at = run[:, None] + within
    factors = x + (tl.minimum(line, rows - 1).to(tl.int64) * IN)[:, None] + x_at
    warp = tl.arange(0, WARPS)[:, None]
    row = tl.minimum(tl.arange(0, 16), rows - 1)[None, :]
    output = first + tl.arange(0, OUTPUTS)[None, :]
    parts, wide, talls, lefts = (), (), (), ()
    for ahead in tl.static_range(min(AHEAD, COUNT)):
        parts += (_tile(weights, weight_at, ahead * CHANNELS, IN, CHANNELS, "evict_first"),)
    if BLOCKS:
        for step in tl.static_range(COUNT):
            group = warp + step * WARPS
            wide += (tl.load(scales + first // BLOCKS * GROUPS + group, mask=group < GROUPS, other=0.0),)
    else:
        factor = tl.load(scales + output, mask=output < out, other=0.0)
    if BIAS:
        more = tl.load(bias + output, mask=output < out, other=0.0).to(tl.float32)
    wait(PDL)
    for ahead in tl.static_range(min(_X_AHEAD, COUNT)):
        lefts += (_tile(factors, x_at, ahead * CHANNELS, IN, CHANNELS, ""),)
        if BLOCKS:
            talls += (tl.load(x_scales + tl.minimum(warp + ahead * WARPS, GROUPS - 1) * scale_column + row),)
    if not BLOCKS:
        tall = tl.load(x_scales + tl.minimum(tl.arange(0, 16), rows - 1)[:, None])
    sums = tl.zeros([WARPS, 16, OUTPUTS], tl.float32)
    # Unrolled: a loop would wait for all loads in flight in each iteration.
    for step in tl.static_range(COUNT):
        if step + AHEAD < COUNT:
            parts += (_tile(weights, weight_at, (step + AHEAD) * CHANNELS, IN, CHANNELS, "evict_first"),)
        if step + _X_AHEAD < COUNT:
            lefts += (_tile(factors, x_at, (step + _X_AHEAD) * CHANNELS, IN, CHANNELS, ""),)
            if BLOCKS:
                group = tl.minimum(warp + (step + _X_AHEAD) * WARPS, GROUPS - 1)
                talls += (tl.load(x_scales + group * scale_column + row),)
        left = _pieces(to_half(lefts[step], MODE), ROWS_P, WARPS)
        if ROWS_P == 8:
            # The instruction has 16 rows: the second half is the first once more.
            left = tl.broadcast_to(left, (2, RUNS, WARPS, 8, 4, _RUN // 32, 2, 4))
        left = tl.reshape(tl.permute(left, (2, 0, 3, 1, 5, 6, 4, 7)), (WARPS, 16, _GROUP))
        right = _pieces(to_half(parts[step], MODE), OUTPUTS, WARPS)
        right = tl.reshape(tl.permute(right, (2, 1, 5, 6, 4, 7, 0, 3)), (WARPS, _GROUP, OUTPUTS))
        if BLOCKS:
            sums += tl.dot(left, right) * (talls[step] * wide[step])[:, :, None]
        else:
            sums = tl.dot(left, right, sums)
    result = tl.sum(sums, 0) * (gain(MODE) * gain(MODE))
    if not BLOCKS:
        result = result * (tall * factor)
    row = tl.arange(0, 16)[:, None]
    mask = (row < rows) & (output < out)
    if BIAS:
        result += more
    tl.store(y + row * out + output, result.to(y.dtype.element_ty), mask=mask)


@launched
def _fp8_single(
    x,
    x_scales,
    weight,
    scales,
    bias,
    y,
    out,
    scale_column: tl.int64,
    IN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCKS: tl.constexpr,
    BIAS: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, channel by channel."""
    announce(PDL)
    COUNT: tl.constexpr = (IN + CHANNELS - 1) // CHANNELS
    GROUPS: tl.constexpr = (IN + _GROUP - 1) // _GROUP
    first = tl.program_id(0) * OUTPUTS
    output = tl.minimum(first + tl.arange(0, OUTPUTS), out - 1)
    channel = tl.arange(0, CHANNELS)
    base = weight + output.to(tl.int64)[:, None] * IN + channel[None, :]
    parts = ()
    for ahead in tl.static_range(min(AHEAD, COUNT)):
        parts += (_tile(base, channel[None, :], ahead * CHANNELS, IN, CHANNELS, "evict_first"),)
    if not BLOCKS:
        factor = tl.load(scales + output)
    if BIAS:
        more = tl.load(bias + output).to(tl.float32)
    wait(PDL)
    if not BLOCKS:
        factor *= tl.load(x_scales)
    sums = tl.zeros([OUTPUTS, CHANNELS], tl.float32)
    for step in tl.static_range(COUNT):
        if step + AHEAD < COUNT:
            parts += (_tile(base, channel[None, :], (step + AHEAD) * CHANNELS, IN, CHANNELS, "evict_first"),)
        left = to_half(_tile(x + channel, channel, step * CHANNELS, IN, CHANNELS, ""), MODE).to(tl.float32)
        if BLOCKS:
            group = tl.minimum(tl.arange(0, CHANNELS // _GROUP) + step * (CHANNELS // _GROUP), GROUPS - 1)
            both = tl.load(x_scales + group * scale_column) * tl.load(scales + first // BLOCKS * GROUPS + group)
            left = tl.reshape(tl.reshape(left, (CHANNELS // _GROUP, _GROUP)) * both[:, None], (CHANNELS,))
        sums += to_half(parts[step], MODE).to(tl.float32) * left[None, :]
    result = tl.sum(sums, 1) * (gain(MODE) * gain(MODE))
    if not BLOCKS:
        result *= factor
    if BIAS:
        result += more
    output = first + tl.arange(0, OUTPUTS)
    tl.store(y + output, result.to(y.dtype.element_ty), mask=output < out)


def few(
    x: Fp8Rows,
    weight: Fp8Weight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tiling: FewTiling | SingleTiling,
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.linear.fp8_reference.fp8_linear_ref``, of at most ``FEW_ROWS`` rows.

    Raises:
        ValueError: rows and weight do not fit each other, or there are too many rows.
    """
    outputs, inputs = weight.codes.shape
    if x.rows > FEW_ROWS or x.codes.shape[1] != inputs:
        raise ValueError(f"{x.rows} rows of {x.codes.shape[1]} and a weight {[outputs, inputs]} do not fit each other")
    y = torch.empty(x.rows, outputs, dtype=out_dtype, device=x.codes.device)
    held = as_bytes(weight.codes)
    tensors = (as_bytes(x.codes), x.scales, held, weight.scales, held if bias is None else bias, y)
    sizes = {"IN": inputs, "OUTPUTS": tiling.outputs, "AHEAD": tiling.ahead, "BLOCKS": weight.tall}
    launch = {"BIAS": bias is not None, "MODE": mode(y.device), "num_warps": tiling.num_warps, "num_stages": 1}
    if isinstance(tiling, SingleTiling) and x.rows > 1:
        raise ValueError(f"{tiling} is for one row, not {x.rows}")
    grid, launch = (cdiv(outputs, tiling.outputs),), launch | options(y.device)
    if isinstance(tiling, SingleTiling):
        _fp8_single[grid](*tensors, outputs, x.scales.stride(1), CHANNELS=tiling.channels, **sizes, **launch)
        return y
    shape = {"WARPS": tiling.num_warps, "ROWS_P": 8 if x.rows <= 8 else 16}
    _fp8_few[grid](*tensors, x.rows, outputs, x.scales.stride(1), **shape, **sizes, **launch)
    return y
