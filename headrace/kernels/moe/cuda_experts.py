"""Experts' products in FP8 of tiles of up to 32 rows, on Hopper GPUs: the kernel of ``experts.cu``. Reference: ``moe_mlp``.

In 16 bits it is no faster than Triton's kernels."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TypeGuard

import torch

from headrace.kernels.cuda_launch import CudaKernel, refusals, tensor_map
from headrace.kernels.moe.codes import ExpertCodes
from headrace.kernels.moe.triton_sort import Routing
from headrace.kernels.support import cdiv
from headrace.model_spec import MoeSpec

Held = torch.Tensor | ExpertCodes
_SOURCE = Path(__file__).with_name("experts.cu")
_RESULTS = {torch.bfloat16: 0, torch.float16: 1}
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
measured on an H200 with the experts of Qwen3-30B-A3B."""


def taken(
    first: Held, second: Held, spec: MoeSpec, routing: Routing, dtype: torch.dtype
) -> tuple[ExpertCodes, ExpertCodes] | None:
    """Returns the matrices if the kernel computes both products. ``dtype``: of the results."""
    silu = spec.gated and spec.act in ("silu", "swish")
    if not silu or dtype not in _RESULTS or (routing.in_order and routing.table_tokens not in _ROWS):
        return None
    return (first, second) if _reads(first) and _reads(second) else None


def _reads(held: Held) -> TypeGuard[ExpertCodes]:
    """Whether the kernel multiplies by the matrices: e4m3 with a scale for each output and row."""
    if not isinstance(held, ExpertCodes) or held.codec != "e4m3" or held.x_scale is not None or held.order is not None:
        return False
    _, outputs, inputs = held.shape
    whole = held.group == (1, inputs) and (held.x_group or 0) >= inputs and held.scales.dtype == torch.float32
    return whole and not (outputs % 128 or inputs % _LINE or held.codes.data_ptr() % 16 or refusals(held.codes.device))


def choose_sizes(routing: Routing) -> tuple[BlockSizes, BlockSizes]:
    """Sizes of the first and the second product."""
    if not routing.in_order:
        return _SINGLE
    return _SOME if routing.choices <= _SOME_CHOICES else _MANY


def first(
    x: torch.Tensor, x_scales: torch.Tensor, routing: Routing, held: ExpertCodes, top_k: int, dtype: torch.dtype
) -> torch.Tensor:
    """The inputs of the second product, ``[choices, inner]`` by place.

    Args:
        x: ``[T, hidden]`` codes, whose scales are ``x_scales`` ``[1, T]``.
    """
    return _product(x, x_scales, routing, held, None, top_k, dtype)


def second(
    x: torch.Tensor, x_scales: torch.Tensor, routing: Routing, held: ExpertCodes, factors: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The output of each choice times its factor, ``[choices, hidden]``.

    Args:
        x: ``[choices, inner]`` codes by place, whose scales are ``x_scales`` ``[1, choices]``. The kernels launched since
            ``first`` made them: its blocks know the tiles, as this kernel needs them to before it waits.
        factors: ``[T, top_k]``
    """
    return _product(x, x_scales, routing, held, factors, factors.shape[1], dtype)


def _product(
    x: torch.Tensor, x_scales: torch.Tensor, routing: Routing, held: ExpertCodes, factors: torch.Tensor | None, top_k: int,
    dtype: torch.dtype
) -> torch.Tensor:  # fmt: skip
    first, (count, height, inputs) = factors is None, held.shape
    rows = routing.table_tokens if routing.in_order else _ROWS[0]
    sizes = choose_sizes(routing)[0 if first else 1]
    out, lines = (height // 2, sizes.lines // 2) if first else (height, sizes.lines)
    y = torch.empty(routing.choices, out, dtype=dtype, device=x.device)
    tiles = routing.tiles(rows)
    read = routing.table, routing.order, x_scales, held.scales, factors
    _kernel(first, routing.in_order, dtype, rows, sizes, top_k, count).launch(
        (tiles * cdiv(out, lines), 1, 1), tensor_map(held.codes.view(-1, inputs), lines, _LINE),
        tensor_map(x, 1 if first else rows, _LINE), *(0 if tensor is None else tensor.data_ptr() for tensor in read),
        y.data_ptr(), tiles, out, cdiv(inputs, _LINE),
    )  # fmt: skip
    return y


@functools.cache
def _kernel(
    first: bool, tabled: bool, dtype: torch.dtype, rows: int, sizes: BlockSizes, top_k: int, experts: int
) -> CudaKernel:
    macros = {"FIRST": int(first), "TABLED": int(tabled), "ROWS": rows, "LINES": sizes.lines, "STAGES": sizes.stages(rows)}
    macros |= {"Y_KIND": _RESULTS[dtype], "TOP_K": top_k, "EXPERTS": experts}
    return CudaKernel(_SOURCE, "expert_product", "MMPPPPPPiii", macros, _THREADS, sizes.shared(rows))
