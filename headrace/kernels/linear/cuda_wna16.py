"""Products of up to 64 rows with weights of 4 bits on Hopper GPUs: the kernel of ``wna16.cu``. Reference:
``headrace.kernels.linear.wna16_reference``.

Weights are the left factor of instructions of a whole warpgroup, from registers. Each group's product is summed in float32, and
its scale multiplies that sum, so that no scale is rounded.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch

from headrace.kernels import support
from headrace.kernels.cuda_launch import CudaKernel, refusals
from headrace.kernels.linear.wna16_reference import RUN, PackedWeight
from headrace.kernels.support import cdiv

MAX_ROWS = 64
_WIDE = (8, 16, 24, 32, 48, 64)
"""Rows of the kernel's instructions."""
_SOURCE = Path(__file__).with_name("wna16.cu")
_KINDS = {torch.bfloat16: 0, torch.float16: 1}
"""Numbers that ``wna16.cu`` has for the dtypes of x and of scales."""


@dataclasses.dataclass(frozen=True)
class CudaPackedTiling:
    """A block makes ``64 * teams`` outputs of all rows, of a part of the inputs; the parts of a tile are a cluster."""

    teams: int
    """Warpgroups of a block, at least 2."""
    parts: int
    """At most 8, which any Hopper GPU takes, and no more than the weight has runs."""
    depth: int = 6
    """Runs of the inputs whose codes are in flight."""
    buffers: int = 3
    """Runs of x in shared memory."""
    together: int = 2
    """Blocks that a multiprocessor is to run at a time."""
    halves: bool = False
    """Half of a run's instructions are complete before the codes of the others become floats, which takes fewer registers."""

    @property
    def outputs(self) -> int:
        return 64 * self.teams

    def shared(self, rows: int, runs: int, middles: bool) -> int:
        """Bytes of shared memory that a block takes, for ``rows`` of an instruction and a weight of so many runs."""
        x = self.buffers * rows * (2 * RUN + 8 * middles)
        barriers = 16 * self.buffers
        scales = cdiv(runs, self.parts) * self.outputs * (6 if middles else 2)
        return max(x + self.depth * self.outputs * RUN // 2 + barriers + scales, 4 * rows * (self.outputs + 4))


_OF_16 = {
    8: CudaPackedTiling(2, 8, together=3, halves=True),
    4: CudaPackedTiling(2, 4, depth=8, buffers=4),
    2: CudaPackedTiling(2, 2, together=3, halves=True),
    1: CudaPackedTiling(2, 1, together=3, halves=True),
}
"""Parts -> the tiling of up to 16 rows."""


def choose(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None, *, gated: bool = False
) -> CudaPackedTiling | None:
    """The tiling with which x ``[rows, K]`` is multiplied faster than by Triton's kernels, as measured on an H200; None: it is
    not, or the kernel does not take it."""
    rows, runs, outputs = len(x), weight.words.shape[1], weight.outputs
    if rows <= 8 or not takes(x, weight, bias):
        return None
    multiprocessors = support.resources(x.device).multiprocessors
    tiling, blocks = None, cdiv(outputs, 128)
    if 3 * multiprocessors <= 4 * cdiv(outputs, 192) <= 4 * multiprocessors:
        tiling = CudaPackedTiling(3, 1, depth=8, buffers=4, together=1)
    elif rows <= 32 and 8 * blocks <= 3 * multiprocessors and 8 <= runs <= 64:
        tiling = CudaPackedTiling(2, 4)
    if rows <= 16 and outputs >= 2048:
        # Blocks that run at the same time: clusters of many do not find room for the third on each multiprocessor.
        fitting = (parts for parts in _OF_16 if blocks * parts <= (2 if parts > 2 else 3) * multiprocessors)
        tiling = next((_OF_16[parts] for parts in fitting if 4 * parts <= runs), None)
    return None if tiling is None or (gated and outputs % tiling.outputs) else tiling


def wide_rows(rows: int) -> int:
    """Rows of the instructions that multiply so many."""
    return next(wide for wide in _WIDE if wide >= rows)


def takes(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> bool:
    """Whether the kernel multiplies x ``[rows, K]`` by the weight: rows are whole pieces of 16 bytes."""
    return (
        0 < len(x) <= MAX_ROWS
        and x.dtype in _KINDS
        and (bias is None or bias.dtype == x.dtype)
        and weight.bits == 4
        and weight.group % RUN == 0
        and weight.scales.dtype in _KINDS
        and support.in_pieces(x)
        and not weight.inputs * x.itemsize & 15
        and not refusals(x.device)
    )


def linear(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, tiling: CudaPackedTiling, *, gated: bool = False
) -> torch.Tensor:
    """Kernel version of ``wna16_linear_ref`` for rows and a weight that the kernel ``takes``; the result has x's dtype.

    Args:
        gated: the result is ``silu(gate) * up`` of the product's halves, as of one without a bias. Outputs are a multiple of
            the tiling's.
    """
    rows, outputs = len(x), weight.outputs
    y = torch.empty(rows, outputs // 2 if gated else outputs, dtype=x.dtype, device=x.device)
    middles = weight.middles
    kinds = x.dtype, weight.scales.dtype
    kernel = _kernel(tiling, wide_rows(rows), weight.words.shape[1], *kinds, middles is not None, gated)
    kernel.launch(
        (tiling.parts, cdiv(outputs, tiling.outputs), 1), x.data_ptr(), weight.words.data_ptr(), weight.scales.data_ptr(),
        0 if middles is None else middles.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr(), rows, outputs,
        weight.inputs, x.stride(0), weight.group,
    )  # fmt: skip
    return y


@functools.cache
def _kernel(
    tiling: CudaPackedTiling, rows: int, runs: int, kind: torch.dtype, scales: torch.dtype, middles: bool, gated: bool
) -> CudaKernel:
    macros = {"ROWS": rows, "TEAMS": tiling.teams, "PARTS": tiling.parts, "DEPTH": tiling.depth, "BUFFERS": tiling.buffers}
    macros |= {"TOGETHER": tiling.together, "HALVES": int(tiling.halves), "HALF": _KINDS[kind], "HALF_SCALES": _KINDS[scales]}
    macros |= {"MIDDLES": int(middles), "GATED": int(gated)}
    threads, shared = 128 * tiling.teams, tiling.shared(rows, runs, middles)
    return CudaKernel(_SOURCE, "wna16_product", "PPPPPPiiiqi", macros, threads, shared, tiling.parts)
