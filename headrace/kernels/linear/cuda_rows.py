"""Products of 65 to 256 rows with a weight in 16 bits, on Hopper GPUs: the kernel of ``rows.cu``. References:
``torch.nn.functional.linear`` and ``headrace.kernels.activation.reference.silu_mul_ref``.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch

from headrace.kernels import support
from headrace.kernels.cuda_launch import CudaKernel, refusals, tensor_map
from headrace.kernels.linear.cuda_wide import MAX_ROWS, MIN_NUMBERS
from headrace.kernels.support import cdiv

MOST_ROWS = 256
_STEP = 32
"""Rows of a kernel are multiples of this."""
_SOURCE = Path(__file__).with_name("rows.cu")
_KINDS = {torch.bfloat16: 0, torch.float16: 1}
_LINE, _GROUP, _FIXED = 128, 64, 1024 + 512
"""Bytes of a line of shared memory, outputs of a group of warps, and bytes that a block needs beside its rings."""
_ROOM = 226 << 10
"""Bytes of shared memory that a block may have."""


@dataclasses.dataclass(frozen=True)
class RowsTiling:
    """Sizes of a block."""

    rows: int
    groups: int
    """Groups of four warps that multiply, 64 outputs each."""
    split: int
    """Blocks that share the channels of a tile, as a cluster: 1 or 2."""
    x_stages: int
    lag: bool = False
    registers: int = 0
    """Registers of a thread that multiplies, where the launch gives it too few; 0: it gives enough."""

    @property
    def stages(self) -> int:
        """Steps of weights in flight."""
        return (_ROOM - _FIXED - self.x_stages * self.rows * _LINE) // (self.groups * _GROUP * _LINE)

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a block takes."""
        return _FIXED + (self.stages * self.groups * _GROUP + self.x_stages * self.rows) * _LINE


@functools.cache
def choose_tiling(rows: int, outputs: int, inputs: int, multiprocessors: int, *, gated: bool) -> RowsTiling | None:
    """Chooses the tiling, as measured on an H200 with the products of Qwen3 8B (see benchmarks/). None: cuBLAS is faster."""
    padded = cdiv(rows, _STEP) * _STEP
    if gated:
        # All tiles at once, with few multiprocessors empty.
        filled = cdiv(outputs, 3 * _GROUP) / multiprocessors
        if not 0.9 <= filled <= 1:
            return None
        return RowsTiling(padded, 3, 1, 4 if rows <= 192 else 3, registers=160 if rows > 160 else 0)
    split = 1 if inputs <= 8192 else 2
    filled = cdiv(outputs, _GROUP) * split / multiprocessors
    if not 0.7 <= filled <= 1 or (rows > 224 and (split == 1 or rows <= 240)):
        return None
    return RowsTiling(padded, 1, split, 5 if rows <= 128 else 4, lag=True)


def choose(x: torch.Tensor, weight: torch.Tensor, *, gated: bool = False) -> RowsTiling | None:
    """The tiling for the product of x ``[rows, in]`` where the kernel is the fastest; None: another is, or it does not take
    them."""
    if not MAX_ROWS < len(x) <= MOST_ROWS or weight.numel() < MIN_NUMBERS or not takes(x, weight):
        return None
    multiprocessors = support.resources(x.device).multiprocessors
    return choose_tiling(len(x), *weight.shape, multiprocessors, gated=gated)


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel multiplies x ``[rows, in]`` by the weight: their rows, and y's, are whole pieces of 16 bytes."""
    whole = support.in_pieces(x, weight) and not x.shape[1] % 8 and not len(weight) % 16
    return x.dtype in _KINDS and whole and not refusals(x.device)


def linear(x: torch.Tensor, weight: torch.Tensor, tiling: RowsTiling, *, gated: bool = False) -> torch.Tensor:
    """``x W^T``, or ``silu_mul`` of it.

    Args:
        x: ``[rows, in]``; last axis contiguous, as of the weight.
        weight: ``[out, in]`` of x's dtype.

    Returns:
        ``[rows, out]``, or ``[rows, out / 2]``
    """
    rows, inputs = x.shape
    out, lines, outputs = len(weight), tiling.groups * _GROUP, tiling.groups * _GROUP
    if gated:
        out, outputs = out // 2, outputs // 2
    y = torch.empty(rows, out, dtype=x.dtype, device=x.device)
    columns = _LINE // x.itemsize
    _kernel(tiling, x.dtype, gated).launch(
        (cdiv(out, outputs) * tiling.split, 1, 1), tensor_map(weight, outputs if gated else lines, columns),
        tensor_map(x, tiling.rows, columns), y.data_ptr(), rows, out, cdiv(inputs, columns),
    )  # fmt: skip
    return y


@functools.cache
def _kernel(tiling: RowsTiling, kind: torch.dtype, gated: bool) -> CudaKernel:
    macros = {"KIND": _KINDS[kind], "ROWS": tiling.rows, "TILE": tiling.groups * _GROUP, "GROUPS": tiling.groups}
    macros |= {"SPLIT": tiling.split, "STAGES": tiling.stages, "X_STAGES": tiling.x_stages, "LAG": int(tiling.lag)}
    macros |= {"REGISTERS": tiling.registers, "GATED": int(gated)}
    threads = 128 * tiling.groups + (128 if tiling.registers else 64)
    return CudaKernel(_SOURCE, "rows_product", "MMPiii", macros, threads, tiling.shared, tiling.split)
