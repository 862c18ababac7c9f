"""Products of rows and weights in FP8. References: ``headrace.kernels.linear.fp8_reference``.

Weights go from the memory to the matrix units by way of registers, many of them at a time, as in
``headrace.kernels.linear.triton``. Numbers of e4m3 are exact in float16, and so are their products in float32.
"""

# A kernel's arguments have no types of Python's, and its tuples grow.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, disable-error-code=assignment

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.kv_cache.triton_fp8 import as_bytes, gain, mode, quantized, scale_of, to_half
from headrace.kernels.linear.fp8_reference import GROUP, Fp8Weight
from headrace.kernels.triton_pdl import announce, begin, options, wait

MAX_ROWS = 16
_OUTPUTS = 16
"""Outputs of a program."""
_AHEAD = 4
"""Tiles of the weight in flight."""
_GROUP = tl.constexpr(GROUP)
_RUN = tl.constexpr(64)
"""Neighbouring channels that four threads load together, 16 bytes each."""


@triton.jit
def _quantize(
    x,
    codes,
    scales,
    scale_column: tl.int64,
    x_row: tl.int64,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_P: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One group of one row."""
    begin(PDL)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    within = tl.arange(0, GROUP_P)
    channel, mask = group * GROUP + within, within < GROUP
    value = tl.load(x + row * x_row + channel, mask=mask, other=0.0).to(tl.float32)
    scale = scale_of(value, 0)
    tl.store(codes + row * IN + channel, quantized(value, scale, MODE), mask=mask)
    tl.store(scales + group * scale_column + row, scale)


def quantize_rows(x: torch.Tensor, group: int, multiple: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernel version of ``headrace.kernels.linear.fp8_reference.quantize_rows_ref``; the last axis is contiguous.

    Args:
        multiple: rows of any content follow until their number is a multiple of this.

    Returns:
        codes ``[T, K]`` float8_e4m3fn; scales ``[T, K / group]`` float32 with a contiguous first axis.
    """
    rows, width = x.shape
    groups, count = width // group, triton.cdiv(rows, multiple) * multiple
    codes = torch.empty(count, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(groups, count, dtype=torch.float32, device=x.device)
    if rows:
        group_p = triton.next_power_of_2(group)
        _quantize[(rows, groups)](
            x, as_bytes(codes), scales, count, x.stride(0), IN=width, GROUP=group, GROUP_P=group_p, MODE=mode(x.device),
            num_warps=min(max(group_p // 512, 1), 16), **options(x.device),
        )  # fmt: skip
    return codes, scales.t()


@triton.jit
def _scale(
    x,
    rows_scale,
    columns_scale,
    bias,
    y,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
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
    x: torch.Tensor,
    rows_scale: torch.Tensor,
    columns_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``x * rows_scale * columns_scale + bias``: ``[T, N]`` float32 by ``[T, 1]`` and ``[N, 1]``, rounded once."""
    rows, width = x.shape
    y = torch.empty(rows, width, dtype=out_dtype, device=x.device)
    if y.numel():
        block = min(1024, triton.next_power_of_2(width))
        _scale[(rows, triton.cdiv(width, block))](
            x, rows_scale, columns_scale, x if bias is None else bias, y, WIDTH=width, BLOCK=block, BIAS=bias is not None,
            num_warps=4, **options(x.device),
        )  # fmt: skip
    return y


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
    """``[lines / 8, runs, warp, line of 8, thread, instruction, half, neighbour]``: where everything in a tile is."""
    return tl.reshape(part, (TILE // 8, _GROUP // _RUN, WARPS, 8, 4, _RUN // 16, 2, 2))


@triton.jit
def _tile(base, at, start: tl.constexpr, IN: tl.constexpr, CHANNELS: tl.constexpr, POLICY: tl.constexpr):
    """Lines from channel ``start`` on; only the last tile may reach past the end."""
    if start + CHANNELS <= IN:
        return tl.load(base + start, eviction_policy=POLICY)
    return tl.load(base + start, mask=at < IN - start, other=0, eviction_policy=POLICY)


@triton.jit(do_not_specialize=["rows"])
def _few(
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
    BIAS: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each warp sums up groups of its own with the matrix units, and the sums are added at the end."""
    announce(PDL)
    CHANNELS: tl.constexpr = WARPS * _GROUP
    COUNT: tl.constexpr = (IN + CHANNELS - 1) // CHANNELS
    GROUPS: tl.constexpr = IN // _GROUP
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
    output = tl.minimum(first + tl.arange(0, OUTPUTS), out - 1)[None, :]
    row = tl.minimum(tl.arange(0, 16), rows - 1)[None, :]
    parts = ()
    for ahead in tl.static_range(min(AHEAD, COUNT)):
        parts += (_tile(weights, weight_at, ahead * CHANNELS, IN, CHANNELS, "evict_first"),)
    wide = ()
    for step in tl.static_range(COUNT):
        group = tl.minimum(step * WARPS + warp, GROUPS - 1)
        wide += (tl.load(scales + output // _GROUP * GROUPS + group),)
    wait(PDL)
    sums = tl.zeros([WARPS, 16, OUTPUTS], tl.float32)
    # Unrolled: a loop would wait for all loads in flight in each iteration.
    for step in tl.static_range(COUNT):
        if step + AHEAD < COUNT:
            parts += (_tile(weights, weight_at, (step + AHEAD) * CHANNELS, IN, CHANNELS, "evict_first"),)
        group = step * WARPS + warp
        tall = tl.load(x_scales + tl.minimum(group, GROUPS - 1) * scale_column + row)
        left = to_half(_tile(factors, x_at, step * CHANNELS, IN, CHANNELS, ""), MODE)
        left = _pieces(left, ROWS_P, WARPS)
        if ROWS_P == 8:
            # The instruction has 16 rows: the second half is the first once more.
            left = tl.broadcast_to(left, (2, RUNS, WARPS, 8, 4, _RUN // 16, 2, 2))
        left = tl.reshape(tl.permute(left, (2, 0, 3, 1, 5, 6, 4, 7)), (WARPS, 16, _GROUP))
        right = _pieces(to_half(parts[step], MODE), OUTPUTS, WARPS)
        right = tl.reshape(tl.permute(right, (2, 1, 5, 6, 4, 7, 0, 3)), (WARPS, _GROUP, OUTPUTS))
        factor = tl.where(group < GROUPS, tall, 0.0)[:, :, None] * wide[step][:, None, :]
        sums += tl.dot(left, right) * factor
    result = tl.sum(sums, 0) * gain(MODE) * gain(MODE)
    row = tl.arange(0, 16)[:, None]
    output = first + tl.arange(0, OUTPUTS)[None, :]
    mask = (row < rows) & (output < out)
    if BIAS:
        result += tl.load(bias + output, mask=output < out, other=0.0).to(tl.float32)
    tl.store(y + row * out + output, result.to(y.dtype.element_ty), mask=mask)


def blocks(
    codes: torch.Tensor, scales: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.linear.fp8_reference.fp8_linear_ref`` for blocks, of at most ``MAX_ROWS`` rows.

    Raises:
        ValueError: codes and weight do not fit each other, or there are too many rows.
    """
    rows, inputs = codes.shape
    outputs = len(weight.codes)
    if rows > MAX_ROWS or weight.codes.shape[1] != inputs or scales.stride(0) != 1:
        raise ValueError(f"codes {list(codes.shape)} and a weight {list(weight.codes.shape)} do not fit each other")
    y = torch.empty(rows, outputs, dtype=out_dtype, device=codes.device)
    held = as_bytes(weight.codes)
    _few[(triton.cdiv(outputs, _OUTPUTS),)](
        as_bytes(codes), scales, held, weight.scales, held if bias is None else bias, y, rows, outputs, scales.stride(1),
        IN=inputs, OUTPUTS=_OUTPUTS, AHEAD=_AHEAD, WARPS=4, ROWS_P=8 if rows <= 8 else 16, BIAS=bias is not None,
        MODE=mode(codes.device), num_warps=4, num_stages=1, **options(codes.device),
    )  # fmt: skip
    return y
