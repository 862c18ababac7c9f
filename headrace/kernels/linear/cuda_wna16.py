"""Products of 9 to some hundred rows with weights of 4 bits on Hopper GPUs: the kernel of ``wna16.cu``. Reference:
``headrace.kernels.linear.wna16_reference``.

Weights are the left factor of instructions of a whole warpgroup, from registers. Each group's product is summed in float32, and
its scale multiplies that sum, so that no scale is rounded.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from pathlib import Path

import torch

from headrace.kernels import support
from headrace.kernels.cuda_launch import CudaKernel, refusals, tensor_map
from headrace.kernels.linear.wna16_reference import RUN, PackedWeight
from headrace.kernels.support import cdiv

MIN_ROWS = 9
MAX_ROWS = 768
"""Up to so many rows the kernel takes less time than the way of the weight's floats to memory and back."""
EXACT_ROWS = 64
"""More rows in bfloat16 multiply weights that are rounded to it, if scales are bfloat16 too and codes have no middles."""
_SOURCE = Path(__file__).with_name("wna16.cu")
_KINDS = {torch.bfloat16: 0, torch.float16: 1}
"""Numbers that ``wna16.cu`` has for the dtypes of x and of scales."""
_MEMORY = 227 << 10


@dataclasses.dataclass(frozen=True)
class CudaPackedTiling:
    """A block makes ``64 * teams`` outputs of some rows, of a part of the inputs; the parts of a tile are a cluster."""

    rows: int
    """Rows of an instruction: 8, 16, 24, 32, 48, 64, 96 or 128."""
    teams: int
    """Warpgroups of a block that multiply: 2 or 3."""
    parts: int = 1
    """At most 8, which any Hopper GPU takes, and no more than the weight has runs."""
    stages: int = 5
    """Runs of the inputs that are in flight or in shared memory."""
    deferred: bool = False
    """Scales multiply the sums of a run while the products of the next are made. It takes registers: with 3 teams, rows are
    at most 16."""
    rounded: bool = False
    """Weights are rounded to bfloat16, the dtype of x and of scales, and have no middles."""

    @property
    def outputs(self) -> int:
        return 64 * self.teams

    @property
    def threads(self) -> int:
        return 128 * self.teams + (128 if self.deferred else 32)

    def shared(self, runs: int, middles: bool) -> int:
        """Bytes of shared memory that a block takes, for a weight of so many runs."""
        stage = 2 * RUN * self.rows + RUN // 2 * self.outputs + 16
        scales = cdiv(runs, self.parts) * self.outputs * (6 if middles else 2)
        return 1024 + max(self.stages * stage + scales, 4 * self.rows * (self.outputs + 4))


_EXACT = (
    (3, {16: 0.44, 24: 0.5, 32: 0.55, 48: 0.6, 64: 0.68}),
    (2, {16: 0.3, 24: 0.34, 32: 0.36, 48: 0.4, 64: 0.45, 128: 0.78}),
)
_ROUNDED = ((3, {64: 0.62, 96: 0.82, 128: 1.03}), (2, {128: 0.69}))
"""Teams of a block, and microseconds of a run by rows of an instruction."""
_LAUNCH, _START, _SUM = 1.4, 1.0, (0.5, 0.01)
"""Microseconds of a launch, of blocks before and after their runs, and those that adding parts takes: for any rows of an
instruction, and for each."""


def choose(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None, *, gated: bool = False
) -> CudaPackedTiling | None:
    """The tiling with which x ``[rows, K]`` is multiplied in the least time, by what runs took on an H200; None: the kernel
    does not take it, or rows are too few or too many."""
    if not MIN_ROWS <= len(x) <= MAX_ROWS or not takes(x, weight, bias):
        return None
    runs, middles = weight.words.shape[1], weight.middles is not None
    rounded = len(x) > EXACT_ROWS and not middles and x.dtype == weight.scales.dtype == torch.bfloat16
    return _choose(len(x), weight.outputs, runs, middles, rounded, gated, support.resources(x.device).multiprocessors)


@functools.cache
def _choose(
    rows: int, outputs: int, runs: int, middles: bool, rounded: bool, gated: bool, multiprocessors: int
) -> CudaPackedTiling | None:
    best, least = None, math.inf
    forms = [(*form, False) for form in _EXACT] + [(*form, True) for form in _ROUNDED if rounded]
    for (teams, times, rounds), parts in itertools.product(forms, (1, 2, 3, 4)):
        if parts > runs or (gated and outputs % (64 * teams)):
            continue
        # Clusters of three and four do not find room on all multiprocessors.
        places = multiprocessors if parts < 3 else multiprocessors * 10 // 11
        for wide in [min(wide for wide in times if wide >= rows)] if rows <= 64 else [wide for wide in times if wide >= 64]:
            tiles = cdiv(outputs, 64 * teams) * cdiv(rows, wide)
            each = times[wide] * (2 if middles else 1)
            block = cdiv(runs, parts) * each + _START + (_SUM[0] + _SUM[1] * wide) * (parts > 1)
            time = cdiv(tiles * parts, places) * block + _LAUNCH
            deferred = teams == 2 and wide <= 64 and not middles
            tiling = _fitting(CudaPackedTiling(wide, teams, parts, deferred=deferred, rounded=rounds), runs, middles)
            if time < least and tiling is not None:
                best, least = tiling, time
    return best


def _fitting(tiling: CudaPackedTiling, runs: int, middles: bool) -> CudaPackedTiling | None:
    """With the fewest of four to eight stages that give a block a multiprocessor for itself, or else the most; None: four do
    not fit."""
    stages = [dataclasses.replace(tiling, stages=count) for count in range(4, 9)]
    fitting = [each for each in stages if each.shared(runs, middles) <= _MEMORY]
    alone = (each for each in fitting if 2 * each.shared(runs, middles) > _MEMORY)
    return next(alone, fitting[-1] if fitting else None)


def takes(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> bool:
    """Whether the kernel multiplies x ``[rows, K]`` by the weight: rows are whole pieces of 16 bytes."""
    return (
        len(x) > 0
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
    kernel = _kernel(tiling, weight.words.shape[1], x.dtype, weight.scales.dtype, middles is not None, gated)
    # [blocks of outputs, lines of 128 bytes, words]
    words = weight.words.view(len(weight.words), -1, 32)
    kernel.launch(
        (tiling.parts, cdiv(outputs, tiling.outputs), cdiv(rows, tiling.rows)),
        tensor_map(x, tiling.rows, 64), tensor_map(words, tiling.outputs // (16 if gated else 8), 4, 32),
        weight.scales.data_ptr(), 0 if middles is None else middles.data_ptr(), 0 if bias is None else bias.data_ptr(),
        y.data_ptr(), rows, outputs, weight.inputs, weight.group,
    )  # fmt: skip
    return y


@functools.cache
def _kernel(
    tiling: CudaPackedTiling, runs: int, kind: torch.dtype, scales: torch.dtype, middles: bool, gated: bool
) -> CudaKernel:
    macros = {"FEW": 0, "ROWS": tiling.rows, "TEAMS": tiling.teams, "PARTS": tiling.parts, "STAGES": tiling.stages}
    macros |= {"DEFERRED": int(tiling.deferred), "ROUNDED": int(tiling.rounded), "MIDDLES": int(middles), "GATED": int(gated)}
    macros |= {"HALF": _KINDS[kind], "HALF_SCALES": _KINDS[scales]}
    threads, shared = tiling.threads, tiling.shared(runs, middles)
    return CudaKernel(_SOURCE, "wna16_product", "MMPPPPiiii", macros, threads, shared, tiling.parts)


def gates_few(x: torch.Tensor, weight: PackedWeight) -> bool:
    """Whether ``few_gated`` takes x ``[rows, K]`` and the weight and is the fastest, as measured: outputs are many for each
    block, so that weights come while others are multiplied."""
    runs, outputs = weight.words.shape[1], weight.outputs
    many = 32 <= runs <= 64 and outputs >= 128 * support.resources(x.device).multiprocessors
    return many and len(x) < MIN_ROWS and not outputs % 16 and weight.middles is None and takes(x, weight)


def few_gated(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """``silu(gate) * up`` of the halves of ``x W^T`` for up to 8 rows ``[rows, K]`` and at most 8,192 inputs, by blocks that
    stay and go through the outputs, a multiple of 16."""
    y = torch.empty(len(x), weight.outputs // 2, dtype=x.dtype, device=x.device)
    runs = weight.words.shape[1]
    kernel, places = _few_kernel(runs, weight.group // RUN, x.dtype, weight.scales.dtype)
    blocks = min(places * support.resources(x.device).multiprocessors, weight.outputs // 16)
    kernel.launch(
        (blocks, 1, 1), x.data_ptr(), weight.words.data_ptr(), tensor_map(weight.scales, len(weight.scales), 8), y.data_ptr(),
        len(x), weight.outputs, weight.inputs, x.stride(0),
    )  # fmt: skip
    return y


@functools.cache
def _few_kernel(runs: int, group: int, kind: torch.dtype, scales: torch.dtype) -> tuple[CudaKernel, int]:
    """The kernel, and how many of its blocks a multiprocessor runs. ``group``: runs of a group."""
    warps = max(cdiv(runs, 4), 4)
    places = 2 if warps <= 8 else 1
    stage = 2 * (4 * RUN * runs + 128 * cdiv(16 * cdiv(runs, group), 128)) + 8
    sums = 2 * 512 * warps
    stages = min((_MEMORY // places - 1024 - sums) // stage, 8)
    macros = {"FEW": runs, "WARPS": warps, "GROUP_RUNS": group, "STAGES": stages}
    macros |= {"HALF": _KINDS[kind], "HALF_SCALES": _KINDS[scales]}
    return CudaKernel(_SOURCE, "wna16_gated", "PPMPiiiq", macros, 32 * warps, stages * stage + sums), places
