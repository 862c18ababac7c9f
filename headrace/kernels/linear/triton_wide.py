"""Products of 2 to 64 rows with a weight in 16 bits, and what adapters add to them, on Hopper GPUs. Reference:
``torch.nn.functional.linear``.

Outputs are the side of which an instruction takes 64, rows of x the other, so that few rows need little padding. The tensor
memory accelerator keeps many tiles of the weight on their way, and the first channels are fetched into the L2 cache while the
kernel before still runs.
"""

# A kernel's arguments have no types of Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import dataclasses

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels.linear import triton_added
from headrace.kernels.linear.triton_added import add, lines_of_b, shares_of_low
from headrace.kernels.linear.triton_fp8_wide import gather_sums
from headrace.kernels.linear.triton_invariant import fetch_near, turns_of
from headrace.kernels.lora.reference import LowRank
from headrace.kernels.support import cdiv, in_pieces, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import announce, options, wait

_OUTPUTS, _PROGRAMS, _WARPS = 64, 132, 4
"""Outputs of a program, programs that fill an H200, and warps of each."""
_NEAR = 256
"""Channels of its weights that a program fetches into the L2 cache early."""


@dataclasses.dataclass(frozen=True)
class SplitTiling:
    """Sizes of a program and its steps."""

    rows: int
    channels: int
    stages: int
    splits: int
    """Programs that share the channels of a tile. The last to be done adds up what all have."""


def choose_tiling(rows: int, out_features: int) -> SplitTiling:
    """Chooses what was fastest on an H200 with the products of Qwen3 8B and Qwen3.5 9B, one after the other: three programs on
    each multiprocessor, or where there are too few tiles for that, one with all of its memory."""
    tiles, wide, many = cdiv(out_features, _OUTPUTS), max(16, power_of_two(rows)), rows > 32
    if 2 * tiles <= _PROGRAMS:
        splits = min(_PROGRAMS // tiles, 4)
        return SplitTiling(wide, 128, 4, splits) if many else SplitTiling(wide, 256, 3, splits)
    if tiles >= _PROGRAMS:
        return SplitTiling(wide, 64, 4 if many else 6, 1)
    return SplitTiling(wide, 128, 5, 1) if many else SplitTiling(wide, 64, 6, 2)


@launched(do_not_specialize=["rows"])
def _wide(
    x, weight, near, bias, y, parts, turns, low, b, places, rows, out, inputs, near_row: tl.int64, b_place: tl.int64,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    NEAR: tl.constexpr, PIECES: tl.constexpr, BIAS: tl.constexpr, ADAPTED: tl.constexpr, END_0: tl.constexpr,
    END_1: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr, COLUMNS: tl.constexpr,
    NUM_PLACES: tl.constexpr, PLACES: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A tile of outputs and all rows; the second axis of programs shares its channels. x and weight are tensor descriptors,
    ``near`` is the weight itself."""
    announce(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    first = tile * OUTPUTS
    output, row = first + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    present = output < out
    steps = tl.cdiv(inputs, CHANNELS)
    begin, end = split * steps // SPLITS, (split + 1) * steps // SPLITS
    if PDL:
        fetch_near(near, tl.minimum(output, out - 1), near_row, begin * CHANNELS, inputs, NEAR, PIECES)
    right_b, shares = 0, ()
    if ADAPTED:
        # The first split has what adapters add.
        adapter = tl.load(places + row, mask=(row < rows) & (split == 0), other=-1)
        if AT_ONCE:
            right_b = lines_of_b(b, adapter, 0, 0, output, present, b_place, RANK, PLACES, COLUMNS)
    wait(PDL)
    if AT_ONCE:
        shares = shares_of_low(low, adapter, row, rows, first, 0, END_0, END_1, RANK, WIDTH, SHARES, COLUMNS)
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        left = weight.load([first, step * CHANNELS])
        right = tl.trans(x.load([0, step * CHANNELS]))
        sums = tl.dot(left, right, sums)
    if ADAPTED and split == 0:
        sums = add(
            sums, right_b, shares, low, b, adapter, row, rows, first, output, present, b_place, END_0, END_1, RANK, WIDTH,
            SHARES, COLUMNS, NUM_PLACES, PLACES, AT_ONCE,
        )  # fmt: skip
    done = True
    if SPLITS > 1:
        done, sums = gather_sums(sums, parts, turns, tile, SPLITS, OUTPUTS, ROWS)
    if done:
        if BIAS:
            sums += tl.load(bias + output, mask=present, other=0.0).to(tl.float32)[:, None]
        place = y + row.to(tl.int64)[:, None] * out + output[None, :]
        tl.store(place, tl.trans(sums).to(y.dtype.element_ty), mask=(row < rows)[:, None] & present[None, :])


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel computes the product of x ``[rows, in]`` fast: both are read in whole pieces of 16 bytes."""
    return x.itemsize == 2 and x.shape[1] >= _NEAR and in_pieces(x, weight)


def adds(x: torch.Tensor, weight: torch.Tensor, added: LowRank) -> bool:
    """Whether the kernel can add what adapters add to a product that it ``takes``."""
    return takes(x, weight) and triton_added.takes(added, _OUTPUTS)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tiling: SplitTiling | None = None,
    added: LowRank | None = None,
) -> torch.Tensor:
    """``x W^T + bias`` for rows and a weight that the kernel ``takes``.

    Args:
        x: ``[rows, in]``; last axis contiguous, as of all that follow.
        weight: ``[out, in]`` of x's dtype.
        bias: ``[out]``
        out_dtype: what the product is rounded to; None: x's dtype.
        tiling: None: ``choose_tiling``'s. Of at least as many rows as x has.
        added: what adapters add before the result is rounded, with parts of whole tiles.

    Returns:
        ``[rows, out]``
    """
    rows, inputs = x.shape
    out = weight.shape[0]
    tiling = tiling or choose_tiling(rows, out)
    y = torch.empty(rows, out, dtype=out_dtype or x.dtype, device=x.device)
    tiles = cdiv(out, _OUTPUTS)
    parts = turns = y
    if tiling.splits > 1:
        parts = torch.empty(tiles * tiling.splits * _OUTPUTS * tiling.rows, dtype=torch.float32, device=x.device)
        turns = turns_of(x.device)
    *adapters, b_place = triton_added.tensors(added, y)
    _wide[(tiles, tiling.splits)](
        TensorDescriptor.from_tensor(x, [tiling.rows, tiling.channels]),
        TensorDescriptor.from_tensor(weight, [_OUTPUTS, tiling.channels]),
        weight, x if bias is None else bias, y, parts, turns, *adapters, rows, out, inputs, weight.stride(0), b_place,
        OUTPUTS=_OUTPUTS, ROWS=tiling.rows, CHANNELS=tiling.channels, SPLITS=tiling.splits, STAGES=tiling.stages, NEAR=_NEAR,
        PIECES=32 * _WARPS // _OUTPUTS, BIAS=bias is not None, num_warps=_WARPS, num_stages=tiling.stages,
        **triton_added.sizes(added), **options(x.device),
    )  # fmt: skip
    return y
