"""Products of 2 to 64 rows with a weight in 16 bits or in FP8, on Hopper GPUs: the kernel of ``wide.cu``. References:
``torch.nn.functional.linear`` and ``headrace.kernels.linear.fp8_reference``.

Blocks that share the channels of a tile are a cluster, and add up their sums in the order of these channels. What adapters add
(``headrace.kernels.lora.reference``) is made in the same launch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import torch

from headrace.kernels import support
from headrace.kernels.cuda_launch import CudaKernel, refusals, tensor_map
from headrace.kernels.linear.fp8_reference import Fp8Rows, Fp8Weight
from headrace.kernels.linear.splits import span_of
from headrace.kernels.lora.reference import PARTS, Factors
from headrace.kernels.support import cdiv

MAX_ROWS = 64
MIN_NUMBERS, SMALL_NUMBERS = 1 << 24, 1 << 23
"""Numbers of a weight from which the kernel is the fastest of all, as measured, and from which it is with some more rows."""
_SOURCE = Path(__file__).with_name("wide.cu")
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2}
"""Numbers that ``wide.cu`` has for the factors' dtypes."""
_RESULTS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_LINE, _OUTPUTS, _THREADS, _FIXED = 128, 64, 160, 1024 + 256
"""Bytes of a line of shared memory, outputs of an instruction, threads of a block, and bytes that it needs beside stages."""
_SHARED_KB = 216
"""Shared memory of a multiprocessor for whole blocks of 72, 108 or 216 KB."""
_MAX_PLACES, _SIXTEEN, _SHARE, _ADDING = 64, 16, 512, 128
"""Places of adapters, ranks that an instruction takes, least channels over which a block multiplies by A, and its threads that
do."""


@dataclasses.dataclass(frozen=True)
class CudaTiling:
    """Sizes of a block and its steps."""

    tile: int
    """Outputs of a block: 16, 32, or a multiple of 64. With fewer than 64, an instruction takes several runs of channels."""
    split: int
    """Blocks that share the channels of a tile, as a cluster: 1 to 8."""
    kilobytes: int
    """Shared memory of a block, at most; it settles how many steps are in flight."""
    lines: int = 1
    """1 or 2: lines of 128 bytes a step of each row and output."""

    @property
    def fold(self) -> int:
        """Runs of channels in an instruction."""
        return max(_OUTPUTS // self.tile, 1)

    def stages(self, rows: int) -> int:
        """Steps in flight."""
        return ((self.kilobytes << 10) - _FIXED) // self._stage(rows)

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor has at a time; with adapters, registers are enough for three."""
        return min(_SHARED_KB // self.kilobytes, 3)

    def shared(self, rows: int) -> int:
        """Bytes of shared memory that a block takes."""
        return _FIXED + self.stages(rows) * self._stage(rows)

    def _stage(self, rows: int) -> int:
        return self.lines * (max(self.tile, _OUTPUTS) + rows * self.fold) * _LINE


_TILINGS = (
    (8, (CudaTiling(16, 1, 108), CudaTiling(32, 2, 72), CudaTiling(64, 1, 72))),
    (32, (CudaTiling(32, 2, 108), CudaTiling(32, 2, 72), CudaTiling(64, 1, 72))),
    (64, (CudaTiling(64, 2, 216, 2), CudaTiling(64, 1, 216, 2), CudaTiling(64, 1, 72))),
)
"""Largest numbers of rows, and the tilings to choose from: the first line that fits counts. As measured on an H200 with the
products of Qwen3 8B in 16 bits, and in FP8 with 64 rows, in the chain of a layer (see benchmarks/)."""
_SMALL_TILINGS = (
    (8, (CudaTiling(16, 1, 108), CudaTiling(16, 1, 72))),
    (16, (CudaTiling(16, 1, 108),)),
    (32, (CudaTiling(32, 1, 108), CudaTiling(32, 2, 108))),
    _TILINGS[2],
)
"""The same for weights of fewer than ``MIN_NUMBERS``, measured with qkv and o of Qwen3 30B-A3B."""
_FP8_TILINGS = ((16, (CudaTiling(32, 1, 216, 2), CudaTiling(32, 2, 72), CudaTiling(64, 1, 72))), *_TILINGS[1:])
"""The same for large weights in FP8."""


@functools.cache
def choose_tiling(rows: int, out_features: int, multiprocessors: int, *, small: bool = False, fp8: bool = False) -> CudaTiling:
    """Chooses the tiling whose blocks leave the least of the multiprocessors empty, with few blocks one after the other."""

    def filled(tiling: CudaTiling) -> float:
        waves = cdiv(out_features, tiling.tile) * tiling.split / (multiprocessors * tiling.resident)
        return waves / math.ceil(waves) - math.ceil(waves) / 100

    table = _SMALL_TILINGS if small else _FP8_TILINGS if fp8 else _TILINGS
    return max(next(tilings for most, tilings in table if rows <= most), key=filled)


_FEW_OUTPUTS = 4096
"""Outputs of a small weight up to which 8 rows of 16 bits are enough, in place of 17. With more, 8 rows alone are as few."""
_GATED = CudaTiling(64, 1, 72)
"""The tiling that finishes gate and up at once: half of a tile's outputs are a gate's. It was the fastest with any rows."""


def choose(x: torch.Tensor, weight: torch.Tensor) -> CudaTiling | None:
    """The tiling for the product of x ``[rows, in]`` where the kernel is the fastest; None: another is, or it does not take
    them."""
    small = weight.numel() < MIN_NUMBERS
    least = 2 if not small else 8 if x.itemsize == 2 and (len(x) == 8 or len(weight) <= _FEW_OUTPUTS) else 17
    if not least <= len(x) <= MAX_ROWS or weight.numel() < SMALL_NUMBERS or not takes(x, weight):
        return None
    multiprocessors = support.resources(x.device).multiprocessors
    return choose_tiling(len(x), len(weight), multiprocessors, small=small, fp8=x.itemsize == 1)


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel multiplies x ``[rows, in]`` by the weight: rows of both are whole pieces of 16 bytes."""
    whole = support.in_pieces(x, weight) and not x.shape[1] * x.itemsize & 15
    return x.dtype in _KINDS and whole and not refusals(x.device)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    tiling: CudaTiling,
    added: Factors | None = None,
    ordered: bool = False,
) -> torch.Tensor:
    """``x W^T + bias`` for rows and a weight that the kernel ``takes``.

    Args:
        x: ``[rows, in]``; last axis contiguous, as of all that follow.
        weight: ``[out, in]`` of x's dtype.
        bias: ``[out]``
        out_dtype: what the product is rounded to; None: x's dtype.
        tiling: of at most 64 rows, each a multiple of 8, times its ``fold``.
        added: adapters that add to it before it is rounded, with parts of whole tiles.
        ordered: channels are cut into as many splits (``splits.span_of``) as a tile has runs and blocks, on whose number alone
            sums depend. Without adapters.

    Returns:
        ``[rows, out]``
    """
    return _product(x, weight, bias, out_dtype or x.dtype, tiling, 0, 0, added=added, ordered=ordered)


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """``silu_mul`` of ``linear``: ``[rows, in] -> [rows, out / 2]``. None where the product's own tiling is another."""
    return None if len(weight) % 2 or choose(x, weight) != _GATED else gated_by(x, weight)


def gated_by(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same of rows and a weight that the kernel ``takes``, summed from the first channel to the last."""
    return _product(x, weight, None, x.dtype, _GATED, 0, 0, gated=True)


def adapted(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None, factors: Factors
) -> torch.Tensor | None:
    """``linear`` and what adapters add. None where the kernel does not take it."""
    if not _adds(x, weight, factors):
        return None
    multiprocessors, small = support.resources(x.device).multiprocessors, weight.numel() < MIN_NUMBERS
    tiling = choose_tiling(len(x), len(weight), multiprocessors, small=small)
    if any(end % tiling.tile for end in factors.ends[:-1]):
        return None
    return linear(x, weight, bias, out_dtype, tiling=tiling, added=factors)


def adapted_gated(x: torch.Tensor, weight: torch.Tensor, factors: Factors) -> torch.Tensor | None:
    """``silu_mul`` of ``adapted``, of parts that are gate and up. None where the product's own tiling is another."""
    half = len(weight) // 2
    if not _adds(x, weight, factors) or tuple(factors.ends) != (half, 2 * half) or choose(x, weight) != _GATED:
        return None
    return _product(x, weight, None, x.dtype, _GATED, 0, 0, gated=True, added=factors)


def _adds(x: torch.Tensor, weight: torch.Tensor, factors: Factors) -> bool:
    """Whether the kernel can add them."""
    return x.ndim == 2 and 1 < len(x) <= MAX_ROWS and adds(x, weight, factors) and takes(x, weight)


def adds(x: torch.Tensor, weight: torch.Tensor, factors: Factors) -> bool:
    """Whether B's columns can be further channels of x ``[rows, in]``: the tensor memory accelerator loads them."""
    a, b, places = factors.a, factors.b, factors.places
    if places is None or x.itemsize != 2 or not x.dtype == weight.dtype == a.dtype == b.dtype:
        return False
    fit = len(places) == len(x) and len(a) <= _MAX_PLACES and len(factors.ends) <= PARTS and not b.shape[2] & 7
    return fit and support.in_pieces(a, b)


def fp8_linear(
    x: Fp8Rows, weight: Fp8Weight, bias: torch.Tensor | None, out_dtype: torch.dtype, tiling: CudaTiling
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.linear.fp8_reference.fp8_linear_ref``, for a scale for each row and output."""
    scales = x.scales.data_ptr(), weight.scales.data_ptr()
    return _product(x.codes[: x.rows], weight.codes, bias, out_dtype, tiling, *scales)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tiling: CudaTiling,
    x_scales: int,
    weight_scales: int,
    *,
    gated: bool = False,
    added: Factors | None = None,
    ordered: bool = False,
) -> torch.Tensor:
    (rows, inputs), out, height = x.shape, len(weight), tiling.tile
    if gated:
        out, height = out // 2, height // 2
    wide = max(8, support.power_of_two(rows))
    columns = _LINE // x.itemsize
    y = torch.empty(rows, out, dtype=dtype, device=x.device)
    kernel = _kernel(tiling, wide, x.dtype, dtype, None if bias is None else bias.dtype, gated, added is not None, ordered)
    blocks = cdiv(out, height) * tiling.split
    adapters = [] if added is None else _adapters(x, added, tiling, blocks, height)
    splits = tiling.split * tiling.fold
    step = tiling.lines * columns
    steps = cdiv(span_of(inputs, splits), step) if ordered else cdiv(inputs, tiling.fold * step)
    kernel.launch(
        (blocks, 1, 1), tensor_map(weight, height, columns), tensor_map(x, wide, columns),
        y.data_ptr(), 0 if bias is None else bias.data_ptr(), x_scales, weight_scales, rows, out,
        steps, *adapters,
    )  # fmt: skip
    return y


def _adapters(x: torch.Tensor, factors: Factors, tiling: CudaTiling, blocks: int, height: int) -> list[bytes | int]:
    """The kernel's arguments for what adapters add."""
    (rows, inputs), rank, parts = x.shape, factors.b.shape[2], len(factors.ends)
    if factors.places is None:
        raise ValueError("adapters have no place for each row")
    numbers = cdiv(inputs, _SHARE) * rows * parts * cdiv(rank, _SIXTEEN) * _SIXTEEN
    shares = torch.empty(numbers, dtype=torch.float32, device=x.device)
    ends = (*factors.ends, *[factors.ends[-1]] * PARTS)[: PARTS - 1]
    # All of these run at the same time, whatever the others wait for.
    workers = min(blocks, support.resources(x.device).multiprocessors * tiling.resident)
    cells = support.counters("wide", x.device)
    return [
        tensor_map(factors.b, height, _SIXTEEN), x.data_ptr(), factors.a.data_ptr(), factors.places.data_ptr(),
        shares.data_ptr(), cells.data_ptr(), x.stride(0), factors.a.stride(0), inputs, rank, parts, *ends, workers,
    ]  # fmt: skip


@functools.cache
def _kernel(
    tiling: CudaTiling,
    rows: int,
    kind: torch.dtype,
    result: torch.dtype,
    bias: torch.dtype | None,
    gated: bool = False,
    adapted: bool = False,
    ordered: bool = False,
) -> CudaKernel:
    macros = {"KIND": _KINDS[kind], "ROWS": rows, "TILE": tiling.tile, "SPLIT": tiling.split, "LINES": tiling.lines}
    macros |= {"STAGES": tiling.stages(rows), "Y_KIND": _RESULTS[result], "GATED": int(gated)}
    macros |= {"BIAS": 0 if bias is None else _RESULTS[bias] + 1}
    parameters = "MMPPPPiii"
    if ordered:
        macros |= {"ORDERED": 1}
    if adapted:
        macros |= {"ADAPTED": 1, "RESIDENT": tiling.resident}
        parameters += "MPPPPPqqiiiiii"
    threads = _THREADS + (_ADDING if adapted else 0)
    return CudaKernel(_SOURCE, "wide_product", parameters, macros, threads, tiling.shared(rows), tiling.split)
