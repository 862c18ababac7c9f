"""Batch-invariant matrix products in 16 bits: every number is summed in one order, however many rows there are.

Weights are the left factor: an instruction takes 64 outputs and so many rows of x, and sums 16 channels. Channels are cut into
splits, whose number depends on the weight's shape alone. A split is summed from its first channel to its last, and splits are
added in their order: by one program where rows fill the device, or by as many as there are splits, of which the last to arrive
adds what all have left.
"""

# A kernel's arguments have no types of Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from headrace.kernels import support
from headrace.kernels.linear.splits import STEP, span_of, splits_of
from headrace.kernels.support import cdiv
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import announce, options, wait

_OUTPUTS, _PROGRAMS = 64, 132
"""Outputs of a tile and programs that fill an H200."""
_LEAST_CHANNELS = 64
"""Channels of a step where they are too few for any tile to take several steps."""
_MOST_TILES = 4096
"""Tiles whose splits are those of several programs, at most."""
_BAND = 8
"""Tiles of rows that go through the outputs together, so that both factors stay in the cache."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Sizes of a program and its steps. On Hopper no result in bfloat16 depends on them."""

    outputs: int
    """A multiple of 64."""
    rows: int
    channels: int
    num_warps: int
    num_stages: int
    near: int = 0
    """Channels of its weights that a program fetches into the L2 cache early: 0 or a power of two."""


ONE_TILE = Tile(64, 64, 64, 4, 4)
"""The tile of all launches where wider instructions may sum in another way."""


@triton.jit
def _fetch_near(weight, output, weight_row, start, inputs, COUNT: tl.constexpr, PIECES: tl.constexpr):
    """``COUNT`` weights of each output from channel ``start`` on, into the L2 cache. Nothing waits for them.

    Rows begin at multiples of 16 bytes. ``PIECES``: copies of a row, so many that each thread has one of its own.
    """
    PIECE: tl.constexpr = COUNT // PIECES
    NBYTES: tl.constexpr = PIECE * weight.dtype.element_ty.primitive_bitwidth // 8
    channel = tl.minimum(start, inputs - COUNT) + tl.arange(0, PIECES) * PIECE
    place = weight + output.to(tl.int64)[:, None] * weight_row + channel[None, :]
    tl.inline_asm_elementwise(
        f"cp.async.bulk.prefetch.L2.global [$1], {NBYTES}; mov.u32 $0, 0;", "=r,l", [place.to(tl.int64)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _sum_split(
    x_base, weight_base, row, rows, output, start, end, IN: tl.constexpr, OUT: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """``[OUTPUTS, ROWS]``: the sums over channels ``start`` to ``end``."""
    channel = tl.arange(0, CHANNELS)
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for first in range(start, end, CHANNELS):
        inside = first + channel
        if IN % CHANNELS == 0 and OUT % OUTPUTS == 0:
            left = tl.load(weight_base + inside[None, :], eviction_policy="evict_first")
        else:
            mask = (output < OUT)[:, None] & (inside < IN)[None, :]
            left = tl.load(weight_base + inside[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        if IN % CHANNELS == 0:
            right = tl.load(x_base + inside[:, None], mask=(row < rows)[None, :], other=0.0)
        else:
            right = tl.load(x_base + inside[:, None], mask=(row < rows)[None, :] & (inside < IN)[:, None], other=0.0)
        sums = tl.dot(left, right, sums)
    return sums


@launched(do_not_specialize=["rows"])
def _invariant_product(
    x, weight, bias, y, partials, turns, rows, x_row: tl.int64, weight_row: tl.int64, y_row: tl.int64, IN: tl.constexpr,
    OUT: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, SPLITS: tl.constexpr,
    SPAN: tl.constexpr, SHARED: tl.constexpr, BAND: tl.constexpr, NEAR: tl.constexpr, PIECES: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A tile of ``OUTPUTS`` and ``ROWS``; where it is ``SHARED``, one of its splits of ``SPAN`` channels."""
    announce(PDL)
    across: tl.constexpr = (OUT + OUTPUTS - 1) // OUTPUTS
    tile = tl.program_id(0)
    band = tile // (BAND * across)
    height = tl.minimum(tl.cdiv(rows, ROWS) - band * BAND, BAND)
    within = tile % (BAND * across)
    row = (band * BAND + within % height) * ROWS + tl.arange(0, ROWS)
    output = within // height * OUTPUTS + tl.arange(0, OUTPUTS)
    split = tl.program_id(1)
    if PDL and NEAR > 0:
        _fetch_near(weight, tl.minimum(output, OUT - 1), weight_row, split * SPAN, IN, NEAR, PIECES)
    wait(PDL)
    x_base = x + row.to(tl.int64)[None, :] * x_row
    weight_base = weight + output.to(tl.int64)[:, None] * weight_row
    if SHARED:
        end = tl.minimum((split + 1) * SPAN, IN)
        total = _sum_split(x_base, weight_base, row, rows, output, split * SPAN, end, IN, OUT, OUTPUTS, ROWS, CHANNELS)
        inside = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        base = partials + tile.to(tl.int64) * (SPLITS * OUTPUTS * ROWS) + inside
        tl.store(base + split * (OUTPUTS * ROWS), total)
        # All of the program's threads have written their numbers before one of them says so.
        tl.debug_barrier()
        last = tl.atomic_add(turns + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(turns + tile, 0)
            total = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for each in range(SPLITS):
                total += tl.load(base + each * (OUTPUTS * ROWS), cache_modifier=".cg")
    else:
        last = True
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for each in range(SPLITS):
            end = tl.minimum((each + 1) * SPAN, IN)
            total += _sum_split(x_base, weight_base, row, rows, output, each * SPAN, end, IN, OUT, OUTPUTS, ROWS, CHANNELS)
    if last:
        if BIAS:
            total += tl.load(bias + output, mask=output < OUT, other=0.0).to(tl.float32)[:, None]
        place = row.to(tl.int64)[None, :] * y_row + output[:, None]
        tl.store(y + place, total.to(y.dtype.element_ty), mask=(row < rows)[None, :] & (output < OUT)[:, None])


def turns_of(device: torch.device) -> torch.Tensor:
    """Counters of the programs of each tile that have left their sums."""
    return support.counters("tiles", device, _MOST_TILES)


def choose_tile(rows: int, out_features: int, splits: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Chooses what was fastest on an H200 with the products of Qwen3 0.6B, 8B and 30B-A3B.

    A wider instruction sums products of bfloat16 as a narrow one does, and those of float16, which are longer, in another way.
    That was tried on Hopper alone, so that other GPUs have one tile.
    """
    if dtype != torch.bfloat16 or not support.is_hopper(device):
        return ONE_TILE
    # Where there are more tiles than run at once, smaller programs leave less of the last round idle.
    wide = cdiv(out_features, _OUTPUTS) > 2 * _PROGRAMS
    if rows <= 16:
        return Tile(64, 16, 128, 4, 3 if wide else 4, near=256)
    if rows <= 64:
        return Tile(64, 64, 64, 4, 4, near=512) if wide else Tile(64, 64, 128, 4, 4, near=256)
    if rows <= 128:
        return Tile(64, 128, 64, 4, 3 if wide else 5, near=256)
    if rows <= 256:
        return Tile(128, 128, 64, 8, 4, near=256) if splits == 1 else Tile(64, 128, 64, 4, 4, near=256)
    return Tile(128, 256, 64, 8, 3) if splits == 1 else Tile(128, 128, 64, 8, 4)


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    tile: Tile | None = None,
    splits: int | None = None,
    shared: bool | None = None,
) -> torch.Tensor:
    """``x W^T + bias`` in 16 bits, as ``triton_matmul.matmul`` does it in 32.

    Args:
        tile, splits: None: chosen.
        shared: whether a tile's splits are those of several programs; None: where there are too few tiles.

    Returns:
        ``[rows, out]``, the same bits whatever ``shared`` is, and of bfloat16 on Hopper whatever ``tile`` is.
    """
    rows, in_features = x.shape
    out_features = weight.shape[0]
    y = torch.empty(rows, out_features, dtype=out_dtype or x.dtype, device=x.device)
    if not y.numel():
        return y
    splits = splits or splits_of(in_features, out_features)
    tile = tile or choose_tile(rows, out_features, splits, x.dtype, x.device)
    tiles = cdiv(rows, tile.rows) * cdiv(out_features, tile.outputs)
    shared = splits > 1 and (tiles < _PROGRAMS if shared is None else shared)
    partials = turns = y
    if shared:
        partials = torch.empty(tiles * splits * tile.outputs * tile.rows, dtype=torch.float32, device=x.device)
        turns = turns_of(x.device)
    # Triton unrolls a loop of one step, and then sums onto the bias instead of adding it at the end: tiles take equal steps.
    channels = _LEAST_CHANNELS if in_features <= STEP else tile.channels
    aligned = not (weight.data_ptr() % 16 or weight.stride(0) % 8 or in_features % 8) and in_features >= tile.near
    _invariant_product[(tiles, splits if shared else 1)](
        x, weight, x if bias is None else bias, y, partials, turns, rows, x.stride(0), weight.stride(0),
        y.stride(0), IN=in_features, OUT=out_features, OUTPUTS=tile.outputs, ROWS=tile.rows, CHANNELS=channels,
        SPLITS=splits, SPAN=span_of(in_features, splits), SHARED=shared, BAND=_BAND,
        NEAR=tile.near if aligned else 0, PIECES=max(32 * tile.num_warps // tile.outputs, 1), BIAS=bias is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **options(x.device),
    )  # fmt: skip
    return y
