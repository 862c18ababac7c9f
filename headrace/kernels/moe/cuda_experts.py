"""Experts' products of tiles of up to 32 rows, on Hopper GPUs: the kernel of ``experts.cu``. Reference: ``moe_mlp``."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch

from headrace.kernels.cuda_launch import CudaKernel, refusals, tensor_map
from headrace.kernels.moe.codes import ExpertCodes
from headrace.kernels.moe.triton_sort import Routing
from headrace.kernels.support import cdiv
from headrace.model_spec import MoeSpec

Held = torch.Tensor | ExpertCodes
_SOURCE = Path(__file__).with_name("experts.cu")
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.uint8: 2, torch.float8_e4m3fn: 2}
_LINE, _THREADS, _FIXED = 128, 160, 1024 + 256
_ROWS = 8, 16, 32
"""Rows of a tile: multiples of instructions' 8."""


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Sizes of a block."""

    lines: int
    """Lines of a weight: a multiple of 64."""
    kilobytes: int
    """Shared memory, at most; it settles how many steps are in flight."""

    def stages(self, rows: int) -> int:
        return ((self.kilobytes << 10) - _FIXED) // ((self.lines + rows) * _LINE)

    def shared(self, rows: int) -> int:
        return _FIXED + self.stages(rows) * (self.lines + rows) * _LINE


_SINGLE = BlockSizes(64, 108), BlockSizes(64, 54)
_SOME = BlockSizes(64, 72), BlockSizes(64, 44)
_MANY = BlockSizes(128, 108), BlockSizes(64, 44)
_SOME_CHOICES = 256
"""Sizes of both products for choices that are tiles, for up to so many sorted choices, and for more: the fastest of those
measured on an H200 with the experts of Qwen3-30B-A3B in FP8."""


def takes(first: Held, second: Held, spec: MoeSpec, routing: Routing, dtype: torch.dtype) -> bool:
    """Whether the kernel computes both products, and is the fastest. ``dtype``: of the results."""
    if not (spec.gated and spec.act in ("silu", "swish")) or dtype not in (torch.bfloat16, torch.float16):
        return False
    if routing.in_order and (routing.table_tokens not in _ROWS or isinstance(first, torch.Tensor)):
        return False
    return all(_reads(held) for held in (first, second)) and isinstance(first, torch.Tensor) == isinstance(second, torch.Tensor)


def _reads(held: Held) -> bool:
    """Whether the kernel multiplies by the matrices: floats, or e4m3 with a scale for each output and row."""
    codes = held if isinstance(held, torch.Tensor) else held.codes
    if isinstance(held, ExpertCodes):
        whole = held.codec == "e4m3" and held.group == (1, held.shape[2]) and held.scales.dtype == torch.float32
        if not whole or (held.x_group or 0) < held.shape[2] or held.x_scale is not None or held.order is not None:
            return False
    outputs, inputs = held.shape[1:]
    fits = not outputs % 128 and not inputs * codes.itemsize % _LINE and not codes.data_ptr() % 16
    return fits and codes.dtype in _KINDS and not refusals(codes.device)


def choose_sizes(routing: Routing) -> tuple[BlockSizes, BlockSizes]:
    """Sizes of the first and the second product."""
    if not routing.in_order:
        return _SINGLE
    return _SOME if routing.choices <= _SOME_CHOICES else _MANY


def first(
    x: torch.Tensor, x_scales: torch.Tensor, routing: Routing, held: Held, top_k: int, dtype: torch.dtype
) -> torch.Tensor:
    """The inputs of the second product, ``[choices, inner]`` by place.

    Args:
        x: ``[T, hidden]``
        x_scales: ``[1, T]`` of e4m3.
    """
    return _product(x, x_scales, routing, held, None, top_k, dtype)


def second(
    x: torch.Tensor, x_scales: torch.Tensor, routing: Routing, held: Held, factors: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The output of each choice times its factor, ``[choices, hidden]``.

    Args:
        x: ``[choices, inner]`` by place, which a kernel has written behind ``first`` or it itself.
        x_scales: ``[1, choices]`` of e4m3.
        factors: ``[T, top_k]``
    """
    return _product(x, x_scales, routing, held, factors, factors.shape[1], dtype)


def _product(
    x: torch.Tensor, x_scales: torch.Tensor, routing: Routing, held: Held, factors: torch.Tensor | None, top_k: int,
    dtype: torch.dtype
) -> torch.Tensor:  # fmt: skip
    first, codes = factors is None, held if isinstance(held, torch.Tensor) else held.codes
    rows = routing.table_tokens if routing.in_order else _ROWS[0]
    sizes = choose_sizes(routing)[0 if first else 1]
    count, height, inputs = held.shape
    out = height // 2 if first else height
    y = torch.empty(routing.choices, out, dtype=dtype, device=x.device)
    columns = _LINE // codes.itemsize
    scales = held.scales.data_ptr() if isinstance(held, ExpertCodes) else 0
    kernel = _kernel(first, routing.in_order, _KINDS[codes.dtype], dtype, rows, sizes, top_k, count)
    outputs = sizes.lines // 2 if first else sizes.lines
    tiles, table = routing.tiles(rows), routing.table
    kernel.launch(
        (tiles * cdiv(out, outputs), 1, 1), tensor_map(codes.view(-1, inputs), outputs, columns),
        tensor_map(x, 1 if first else rows, columns), 0 if table is None else table.data_ptr(), routing.order.data_ptr(),
        x_scales.data_ptr(), scales, 0 if factors is None else factors.data_ptr(), y.data_ptr(), tiles, out,
        cdiv(inputs, columns),
    )  # fmt: skip
    return y


@functools.cache
def _kernel(
    first: bool, tabled: bool, kind: int, dtype: torch.dtype, rows: int, sizes: BlockSizes, top_k: int, experts: int
) -> CudaKernel:
    macros = {"FIRST": int(first), "KIND": kind, "ROWS": rows, "LINES": sizes.lines, "STAGES": sizes.stages(rows)}
    macros |= {"TABLED": int(tabled), "Y_KIND": _KINDS[dtype], "TOP_K": top_k, "EXPERTS": experts}
    return CudaKernel(_SOURCE, "expert_product", "MMPPPPPPiii", macros, _THREADS, sizes.shared(rows))
