"""Products of one row with a large weight in FP8, on Hopper GPUs: the kernel of ``single.cu``. References:
``headrace.kernels.linear.fp8_reference``.

Blocks are all on the multiprocessors at once, and parts of the weight in their shared memory before the kernel before is
complete.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch

from headrace.kernels import support
from headrace.kernels.cuda_launch import CudaKernel, refusals, tensor_map
from headrace.kernels.linear.fp8_reference import Activations, Fp8Rows, Fp8Weight
from headrace.kernels.support import cdiv

MIN_NUMBERS = 1 << 24
"""Numbers of a weight from which the kernel is the fastest of all, as measured on an H200."""
ROUNDED = (2048, 4096)
"""Channels of a row that each block may round to FP8 for itself."""
_SOURCE = Path(__file__).with_name("single.cu")
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""Numbers that ``single.cu`` has for dtypes."""
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
def choose_tiling(inputs: int, lines: int, groups: int, multiprocessors: int) -> RowTiling | None:
    """Chooses the tiling for ``groups`` times so many lines of ``inputs`` channels; None: the kernel takes no such lines."""
    mine, rest = divmod(inputs, _PIECE * _WARPS)
    for tile in (8, 4):
        parts = _PIECES * groups // tile
        runs = [run for run in range(parts, 6, parts) if mine % run == 0]
        if rest or not runs or mine // parts * 8 > _REGISTERS:
            continue
        run, tiles = runs[-1], cdiv(lines * groups, tile)
        turns, loads = cdiv(tiles, _RESIDENT * multiprocessors), mine // run

        def stages(kept: int, run: int = run, tile: int = tile) -> int:
            room = _SHARED // _RESIDENT - 1024 - _beside(inputs, groups, tile, kept)
            return min(room // (_WARPS * run * tile * _PIECE), _MAX_STAGES)

        # The first tiles of a block are fixed, and it is worth drawing where there are many more.
        whole = stages(_TURNS) // loads
        if whole and turns > 2 * (whole + 1):
            return RowTiling(tile, run, whole * loads, True)
        return RowTiling(tile, run, stages(min(turns, _TURNS)), False)
    return None


def _beside(inputs: int, groups: int, tile: int, turns: int) -> int:
    """Bytes of shared memory beside stages: x, barriers, the sums and scales of so many turns, and the queue."""
    return inputs + 8 * (_WARPS * _MAX_STAGES + 1) + turns * (groups * _PIECES * _WARPS + tile) * 4 + _QUEUE * 4


def fp8_linear(
    x: Activations, weight: Fp8Weight, bias: torch.Tensor | None, out_dtype: torch.dtype, *, gated: bool = False
) -> torch.Tensor | None:
    """Kernel version of ``headrace.kernels.linear.fp8_reference.fp8_linear_ref``; None where another kernel is faster, or this
    one does not take them.

    Args:
        x: one row, rounded with one scale; or of 16 bits, which each block rounds for itself.
        bias: None with ``gated``.
        gated: ``silu(gate) * up`` of the product's halves, rounded where separate kernels round: ``[1, N / 2]``.
    """
    rounded = isinstance(x, Fp8Rows)
    codes, rows = (x.codes, x.rows) if isinstance(x, Fp8Rows) else (x, len(x))
    if rows != 1 or codes.data_ptr() & 15 or not codes.is_contiguous():
        return None
    if not rounded and (codes.shape[1] not in ROUNDED or codes.dtype not in (torch.bfloat16, torch.float16)):
        return None
    groups = 2 if gated else 1
    tiling = choose(weight, groups)
    if tiling is None:
        return None
    outputs, inputs = len(weight.codes) // groups, codes.shape[1]
    tile = tiling.lines // groups
    tiles, most = cdiv(outputs, tile), support.resources(codes.device).multiprocessors * _RESIDENT
    # Where tiles are fixed, blocks have as many of them, or one less.
    fixed = cdiv(tiles, most)
    blocks = cdiv(tiles, fixed)
    if tiling.draws:
        blocks, fixed = most, tiling.stages * tiling.run * _WARPS * _PIECE // inputs + 1
    kernel = _kernel(
        tiling, inputs, groups, fixed, out_dtype, None if bias is None else bias.dtype, None if rounded else x.dtype
    )
    y = torch.empty(1, outputs, dtype=out_dtype, device=codes.device)
    kernel.launch(
        (blocks, 1, 1), tensor_map(weight.codes.view(-1, inputs // _PIECE, _PIECE).transpose(0, 1), tiling.run, tile, _PIECE),
        codes.data_ptr(), x.scales.data_ptr() if isinstance(x, Fp8Rows) else 0, weight.scales.data_ptr(),
        0 if bias is None else bias.data_ptr(), y.data_ptr(), outputs, tiles,
        support.counters("single", codes.device).data_ptr() if tiling.draws else 0,
    )  # fmt: skip
    return y


def choose(weight: Fp8Weight, groups: int = 1) -> RowTiling | None:
    """The tiling for the product of one row with a weight, of its ``groups`` parts as one; None: as for ``fp8_linear``."""
    codes = weight.codes
    (outputs, inputs), device = codes.shape, codes.device
    if weight.in_blocks or outputs * inputs < MIN_NUMBERS or outputs % groups or codes.data_ptr() & 15 or refusals(device):
        return None
    return choose_tiling(inputs, outputs // groups, groups, support.resources(device).multiprocessors)


@functools.cache
def _kernel(
    tiling: RowTiling,
    inputs: int,
    groups: int,
    fixed: int,
    result: torch.dtype,
    bias: torch.dtype | None,
    rounded: torch.dtype | None,
) -> CudaKernel:
    """``rounded``: dtype of a row that blocks round; None: they do not."""
    flush = _TURNS if tiling.draws else min(fixed, _TURNS)
    macros = {"OUT_KIND": _KINDS[result], "INPUTS": inputs, "LINES": tiling.lines, "GROUPS": groups, "WARPS": _WARPS}
    macros |= {"STAGES": tiling.stages, "RUN": tiling.run, "RESIDENT": _RESIDENT, "FIXED": fixed, "DRAWS": int(tiling.draws)}
    macros |= {"FLUSH": flush, "BIAS": 0 if bias is None else _KINDS[bias] + 1}
    macros |= {"ROUNDS": 0 if rounded is None else _KINDS[rounded] + 1}
    shared = _WARPS * tiling.stages * tiling.run * tiling.lines * _PIECE + _beside(inputs, groups, tiling.lines, flush)
    return CudaKernel(_SOURCE, "single", "MPPPPPiiP", macros, 32 * _WARPS, shared)
