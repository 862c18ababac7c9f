"""Products of one row with a large weight in 16 bits or in FP8, on Hopper GPUs: the kernel of ``single.cu``. References:
``torch.nn.functional.linear`` and ``headrace.kernels.linear.fp8_reference``.

Blocks are all on the multiprocessors at once, and parts of the weight in their shared memory before the kernel before is
complete.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch

from headrace.kernels import support
from headrace.kernels.cuda_launch import CudaKernel, counters, refusals, tensor_map
from headrace.kernels.linear.fp8_reference import Activations, Fp8Rows, Fp8Weight
from headrace.kernels.support import cdiv

MIN_NUMBERS = 1 << 24
"""Numbers of a weight from which the kernel is the fastest of all, as measured on an H200."""
ROUNDED = (2048, 4096)
"""Channels of a row that each block may round to FP8 for itself."""
_SOURCE = Path(__file__).with_name("single.cu")
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2}
"""Numbers that ``single.cu`` has for the factors' dtypes."""
_RESULTS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_PIECE, _PIECES, _QUEUE = 128, 8, 32
"""Bytes of a piece of a line, pieces of a step, and tiles that a block keeps in mind."""
_WARPS, _RESIDENT, _MAX_STAGES = 8, 2, 16
"""Warps of a block, blocks of a multiprocessor, and stages of a warp in flight, at most."""
_SHARED, _REGISTERS, _TURNS = 228 << 10, 96, 16
"""Bytes of shared memory of a multiprocessor, registers of a thread for x, and turns whose sums a block keeps."""


@dataclasses.dataclass(frozen=True)
class RowTiling:
    """Sizes of a block and its tiles."""

    lines: int
    """Lines of a tile, those of gate and up together: 4 or 8."""
    run: int
    """Pieces of a line in a stage."""
    stages: int
    """Stages of a warp in flight."""
    draws: bool
    """Blocks draw their tiles, but for the first few."""


@functools.cache
def choose_tiling(inputs: int, size: int, lines: int, groups: int, multiprocessors: int) -> RowTiling | None:
    """Chooses the tiling for ``groups`` times so many lines of ``inputs`` numbers of ``size`` bytes; None: the kernel takes no
    such lines."""
    mine, rest = divmod(inputs * size, _PIECE * _WARPS)
    for tile in (8, 4):
        parts = _PIECES * groups // tile
        runs = [run for run in range(parts, 6, parts) if mine % run == 0]
        if rest or not runs or mine // parts * (8 if size == 1 else 4) > _REGISTERS:
            continue
        run, tiles = runs[-1], cdiv(lines * groups, tile)
        turns, loads = cdiv(tiles, _RESIDENT * multiprocessors), mine // run

        def stages(kept: int, run: int = run, tile: int = tile) -> int:
            room = _SHARED // _RESIDENT - 1024 - _beside(inputs * size, groups, tile, kept)
            return min(room // (_WARPS * run * tile * _PIECE), _MAX_STAGES)

        # The first tiles of a block are fixed, and it is worth drawing where there are many more.
        whole = stages(_TURNS) // loads
        if whole and turns > 2 * (whole + 1):
            return RowTiling(tile, run, whole * loads, True)
        return RowTiling(tile, run, stages(min(turns, _TURNS)), False)
    return None


def _beside(line: int, groups: int, tile: int, turns: int) -> int:
    """Bytes of shared memory beside stages: x, barriers, the sums and scales of so many turns, and the queue."""
    return line + 8 * (_WARPS * _MAX_STAGES + 1) + turns * (groups * _PIECES * _WARPS + tile) * 4 + _QUEUE * 4


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor | None:
    """``x W^T + bias``: ``[1, in] -> [1, out]``; None where another kernel is faster, or this one does not take them.

    Args:
        x: ``[1, in]`` of 16 bits; contiguous, as all that follow.
        weight: ``[out, in]`` of x's dtype.
        bias: ``[out]``
        out_dtype: what the product is rounded to; None: x's dtype.
    """
    tiling = choose(x, weight)
    return None if tiling is None else _product(x, weight, bias, out_dtype or x.dtype, tiling)


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """``silu(gate) * up`` of the halves of ``linear``: ``[1, in] -> [1, out / 2]``, rounded where separate kernels round."""
    tiling = choose(x, weight, groups=2)
    return None if tiling is None else _product(x, weight, None, x.dtype, tiling, groups=2)


def fp8_linear(
    x: Activations, weight: Fp8Weight, bias: torch.Tensor | None, out_dtype: torch.dtype, *, gated: bool = False
) -> torch.Tensor | None:
    """``linear``, or ``gated``, by a weight with a scale for each output.

    Args:
        x: one row with one scale; or of 16 bits, which each block rounds for itself.
    """
    codes, groups = x.codes if isinstance(x, Fp8Rows) else x, 2 if gated else 1
    rounds = codes.dtype != weight.codes.dtype
    if weight.in_blocks or (rounds and (codes.dtype not in _KINDS or codes.shape[1] not in ROUNDED)):
        return None
    rows = x.rows if isinstance(x, Fp8Rows) else len(x)
    tiling = choose(codes[:rows], weight.codes, groups=groups)
    if tiling is None:
        return None
    scale = x.scales.data_ptr() if isinstance(x, Fp8Rows) else 0
    return _product(codes[:1], weight.codes, bias, out_dtype, tiling, scale, weight.scales.data_ptr(), groups=groups)


def choose(x: torch.Tensor, weight: torch.Tensor, *, groups: int = 1) -> RowTiling | None:
    """The tiling for the product of x ``[rows, in]``, of its ``groups`` parts as one; None: another kernel is faster, or this
    one does not take them."""
    (outputs, inputs), whole = weight.shape, x.is_contiguous() and weight.is_contiguous()
    if len(x) != 1 or weight.numel() < MIN_NUMBERS or outputs % groups or weight.dtype not in _KINDS:
        return None
    if not whole or (x.data_ptr() | weight.data_ptr()) & 15 or refusals(weight.device):
        return None
    multiprocessors = support.resources(weight.device).multiprocessors
    return choose_tiling(inputs, weight.itemsize, outputs // groups, groups, multiprocessors)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tiling: RowTiling,
    x_scale: int = 0,
    scales: int = 0,
    *,
    groups: int = 1,
) -> torch.Tensor:
    """With e4m3, x of another dtype is rounded in the kernel."""
    outputs, inputs = len(weight) // groups, weight.shape[1]
    tile, piece = tiling.lines // groups, _PIECE // weight.itemsize
    tiles = cdiv(outputs, tile)
    most = min(support.resources(x.device).multiprocessors * _RESIDENT, tiles)
    turns = cdiv(tiles, most)
    # Where tiles are fixed, blocks have as many of them, or one less.
    blocks, fixed = cdiv(tiles, turns), turns
    if tiling.draws:
        blocks, fixed = most, tiling.stages * tiling.run * _WARPS * piece // inputs + 1
    kinds = weight.dtype, dtype, None if bias is None else bias.dtype, None if x.dtype == weight.dtype else x.dtype
    kernel = _kernel(tiling, inputs, groups, fixed, *kinds)
    y = torch.empty(1, outputs, dtype=dtype, device=x.device)
    kernel.launch(
        (blocks, 1, 1), tensor_map(weight.view(len(weight), -1, piece).transpose(0, 1), tiling.run, tile, piece),
        x.data_ptr(), x_scale, scales, 0 if bias is None else bias.data_ptr(), y.data_ptr(), outputs, tiles,
        counters("single", x.device).data_ptr() if tiling.draws else 0,
    )  # fmt: skip
    return y


@functools.cache
def _kernel(
    tiling: RowTiling,
    inputs: int,
    groups: int,
    fixed: int,
    kind: torch.dtype,
    result: torch.dtype,
    bias: torch.dtype | None,
    rounded: torch.dtype | None,
) -> CudaKernel:
    flush = _TURNS if tiling.draws else min(fixed, _TURNS)
    macros = {"KIND": _KINDS[kind], "OUT_KIND": _RESULTS[result], "INPUTS": inputs, "LINES": tiling.lines, "GROUPS": groups}
    macros |= {"WARPS": _WARPS, "STAGES": tiling.stages, "RUN": tiling.run, "RESIDENT": _RESIDENT, "FIXED": fixed}
    macros |= {"DRAWS": int(tiling.draws), "FLUSH": flush, "BIAS": 0 if bias is None else _RESULTS[bias] + 1}
    macros |= {"ROUNDS": 0 if rounded is None else _KINDS[rounded] + 1}
    shared = _WARPS * tiling.stages * tiling.run * tiling.lines * _PIECE
    shared += _beside(inputs * kind.itemsize, groups, tiling.lines, flush)
    return CudaKernel(_SOURCE, "single", "MPPPPPiiP", macros, 32 * _WARPS, shared)
