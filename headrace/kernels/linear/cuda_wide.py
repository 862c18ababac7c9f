"""Products of 2 to 64 rows with a weight in 16 bits or in FP8, on Hopper GPUs: the kernel of ``wide.cu``. References:
``torch.nn.functional.linear`` and ``headrace.kernels.linear.fp8_reference``.

Blocks that share the channels of a tile are a cluster, and add up their sums in the order of these channels.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch

from headrace.kernels import support
from headrace.kernels.cuda_launch import Kernel, refusals, tensor_map
from headrace.kernels.linear.fp8_reference import Fp8Rows, Fp8Weight
from headrace.kernels.support import cdiv

MAX_ROWS = 64
_SOURCE = Path(__file__).with_name("wide.cu")
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2}
"""Numbers that ``wide.cu`` has for the factors' dtypes."""
_RESULTS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_LINE, _OUTPUTS, _THREADS = 128, 64, 160
"""Bytes of a line of shared memory, outputs of an instruction, and threads of a block."""


@dataclasses.dataclass(frozen=True)
class CudaTiling:
    """Sizes of a block and its steps."""

    tile: int
    """Outputs of a block: 16, 32, 64 or 128. With fewer than 64, an instruction takes so many channels more."""
    split: int
    """Blocks that share the channels of a tile, as a cluster: 1, 2, 4 or 8."""
    lines: int
    """1 or 2: 128 or 256 bytes a step of each row and output, and more with fewer outputs than 64."""
    stages: int
    """Steps in flight."""

    @property
    def fold(self) -> int:
        return max(_OUTPUTS // self.tile, 1)

    def shared(self, rows: int) -> int:
        """Bytes of shared memory that a block takes."""
        height = max(self.tile // _OUTPUTS, 1)
        return 1024 + self.stages * self.lines * (height * _OUTPUTS + rows * self.fold) * _LINE + 256


def choose_tiling(rows: int, out_features: int, in_features: int, itemsize: int) -> CudaTiling:
    """Of so few bytes that blocks of two products are on a multiprocessor at once."""
    split = next(split for split in (8, 4, 2, 1) if split == 1 or cdiv(out_features, 128) * split <= 144)
    return CudaTiling(128, split, 1, 4)


def choose(x: torch.Tensor, weight: torch.Tensor) -> CudaTiling | None:
    """The tiling for the product of x ``[rows, in]`` where it is faster than others; None: others are, or it is not taken."""
    rows, (out, inputs) = len(x), weight.shape
    if not 1 < rows <= MAX_ROWS or weight.numel() < 1 << 24 or not takes(x, weight):
        return None
    return choose_tiling(max(8, support.power_of_two(rows)), out, inputs, x.itemsize)


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel multiplies x ``[rows, in]`` by the weight: rows of both are whole pieces of 16 bytes."""
    pieces = x.data_ptr() | weight.data_ptr() | x.stride(0) * x.itemsize | weight.stride(0) * x.itemsize
    return (
        1 < len(x) <= MAX_ROWS and x.dtype in _KINDS and not (pieces | x.shape[1] * x.itemsize) & 15 and not refusals(x.device)
    )


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tiling: CudaTiling | None = None,
) -> torch.Tensor:
    """``x W^T + bias`` for rows and a weight that the kernel ``takes``.

    Args:
        x: ``[rows, in]``; last axis contiguous, as of all that follow.
        weight: ``[out, in]`` of x's dtype.
        bias: ``[out]``
        out_dtype: what the product is rounded to; None: x's dtype.
        tiling: None: ``choose_tiling``'s.

    Returns:
        ``[rows, out]``
    """
    return _product(x, weight, bias, out_dtype or x.dtype, tiling, 0, 0)


def fp8_linear(
    x: Fp8Rows, weight: Fp8Weight, bias: torch.Tensor | None, out_dtype: torch.dtype, tiling: CudaTiling | None = None
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.linear.fp8_reference.fp8_linear_ref``, for a scale for each row and output."""
    scales = x.scales.data_ptr(), weight.scales.data_ptr()
    return _product(x.codes[: x.rows], weight.codes, bias, out_dtype, tiling, *scales)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tiling: CudaTiling | None,
    x_scales: int,
    weight_scales: int,
) -> torch.Tensor:
    (rows, inputs), out = x.shape, len(weight)
    wide = max(8, support.power_of_two(rows))
    tiling = tiling or choose_tiling(wide, out, inputs, x.itemsize)
    columns = _LINE // x.itemsize
    y = torch.empty(rows, out, dtype=dtype, device=x.device)
    kernel = _kernel(tiling, wide, x.dtype, dtype, None if bias is None else bias.dtype)
    kernel.launch(
        (cdiv(out, tiling.tile) * tiling.split, 1, 1), tensor_map(weight, tiling.tile, columns), tensor_map(x, wide, columns),
        y.data_ptr(), 0 if bias is None else bias.data_ptr(), x_scales, weight_scales, rows, out,
        cdiv(inputs, tiling.lines * tiling.fold * columns),
    )  # fmt: skip
    return y


@functools.cache
def _kernel(tiling: CudaTiling, rows: int, kind: torch.dtype, result: torch.dtype, bias: torch.dtype | None) -> Kernel:
    macros = {"KIND": _KINDS[kind], "ROWS": rows, "TILE": tiling.tile, "SPLIT": tiling.split, "LINES": tiling.lines}
    macros |= {
        "STAGES": tiling.stages,
        "Y_KIND": _RESULTS[result],
        "BIAS": 0 if bias is None else _RESULTS[bias] + 1,
        "GATED": 0,
    }
    return Kernel(_SOURCE, "wide_product", "MMPPPPiii", macros, _THREADS, tiling.shared(rows), tiling.split)
