"""Batch-invariant products of up to 256 rows in bfloat16 on Hopper GPUs, by the kernels of ``wide.cu`` and ``rows.cu``: bit for
bit those of ``triton_invariant``, which multiplies more rows. Each split of the channels is summed from its first to its last,
and splits are added in their order; how wide an instruction is does not matter.
"""

from __future__ import annotations

import torch

from headrace.kernels import support
from headrace.kernels.linear import cuda_rows, cuda_tall, cuda_wide
from headrace.kernels.linear.cuda_rows import MOST_ROWS, RowsTiling
from headrace.kernels.linear.cuda_wide import MAX_ROWS, CudaTiling
from headrace.kernels.linear.splits import STEP, splits_of
from headrace.kernels.support import cdiv

_MAX_SPLIT = 8
"""Blocks of a cluster."""


def choose_wide(rows: int, outputs: int, splits: int, multiprocessors: int) -> CudaTiling | None:
    """The tiling of up to 64 rows, as measured on an H200 with the products of Qwen3 8B (see benchmarks/). None: no cluster is
    as large as that."""
    if splits > _MAX_SPLIT:
        return None
    # With few rows, an instruction takes two splits.
    half = splits % 2 == 0 and rows <= 32
    tile, split = (32, splits // 2) if half else (64, splits)
    waves = cdiv(outputs, tile) * split / multiprocessors
    return CudaTiling(tile, split, 216, 2) if waves <= 1 else CudaTiling(tile, split, 108 if waves <= 2 else 72)


def choose_rows(rows: int, inputs: int, outputs: int, splits: int, multiprocessors: int) -> RowsTiling | None:
    """The tiling of 65 to 256 rows likewise: its blocks have equal shares of the channels, which are the splits."""
    rows = cdiv(rows, 32) * 32
    if inputs % (splits * STEP) or splits not in (1, 2, 4):
        return None
    if cdiv(outputs, 64) * splits <= multiprocessors:
        return RowsTiling(rows, 1, splits, 5 if rows <= 128 else 4 if rows <= 192 else 3, lag=True)
    return choose_tall(rows) if splits == 1 else None


def choose_tall(rows: int) -> RowsTiling:
    """The tiling of more outputs, which are in one split, and of gate and up."""
    rows = cdiv(rows, 32) * 32
    return RowsTiling(rows, 3, 1, 4 if rows <= 192 else 3, registers=160 if rows > 160 else 0)


def choose_fp8(x: torch.Tensor, weight: torch.Tensor) -> CudaTiling | None:
    """The tiling of up to 64 rows for codes ``[rows, in]`` and ``[out, in]`` with a scale for each row and output, which have
    one split; None likewise."""
    if not 0 < len(x) <= MAX_ROWS or not cuda_wide.takes(x, weight):
        return None
    return choose_wide(len(x), len(weight), 1, support.resources(x.device).multiprocessors)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor | None:
    """``x W^T + bias``: ``[rows, in] -> [rows, out]``; None: the kernels do not take it."""
    (rows, inputs), outputs, dtype = x.shape, len(weight), out_dtype or x.dtype
    if x.dtype != torch.bfloat16 or not 0 < rows <= MOST_ROWS:
        return None
    splits, multiprocessors = splits_of(inputs, outputs), support.resources(x.device).multiprocessors
    if rows <= MAX_ROWS:
        wide = choose_wide(rows, outputs, splits, multiprocessors) if cuda_wide.takes(x, weight) else None
        return None if wide is None else cuda_wide.linear(x, weight, bias, dtype, tiling=wide, ordered=True)
    if bias is not None or dtype != x.dtype or not cuda_rows.takes(x, weight):
        return None
    tiling = choose_rows(rows, inputs, outputs, splits, multiprocessors)
    return None if tiling is None else cuda_rows.linear(x, weight, tiling)


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """``silu_mul`` of ``linear``, of more rows too: ``[rows, in] -> [rows, out / 2]``, with the same bits; None likewise."""
    (rows, inputs), outputs = x.shape, len(weight)
    if x.dtype != torch.bfloat16 or not rows or outputs % 2 or splits_of(inputs, outputs) > 1:
        return None
    if rows > MOST_ROWS:
        return cuda_tall.gated(x, weight)
    if rows <= MAX_ROWS:
        return cuda_wide.gated_by(x, weight) if cuda_wide.takes(x, weight) else None
    return cuda_rows.linear(x, weight, choose_tall(rows), gated=True) if cuda_rows.takes(x, weight) else None
