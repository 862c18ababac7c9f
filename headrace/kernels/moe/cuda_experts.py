"""Experts' products of tiles of up to 16 rows, on Hopper GPUs: the kernel of ``experts.cu``. Reference: ``moe_mlp``."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch

from headrace.kernels.cuda_launch import CudaKernel, refusals, tensor_map
from headrace.kernels.moe.codes import ExpertCodes
from headrace.kernels.moe.triton_sort import Routing
from headrace.kernels.support import cdiv

_SOURCE = Path(__file__).with_name("experts.cu")
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.uint8: 2, torch.float8_e4m3fn: 2}
_LINE, _THREADS, _FIXED = 128, 160, 1024 + 256
_FEWEST = 8
"""Rows of a tile at least."""


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


FIRST, SECOND = BlockSizes(64, 72), BlockSizes(64, 72)
ON = True


def takes(held: torch.Tensor | ExpertCodes, routing: Routing, dtype: torch.dtype) -> bool:
    """Whether the kernel multiplies rows by place or by token, whose results are of ``dtype``."""
    if not ON or dtype not in (torch.bfloat16, torch.float16) or (routing.in_order and routing.table_tokens not in (8, 16)):
        return False
    codes = held if isinstance(held, torch.Tensor) else held.codes
    if isinstance(held, ExpertCodes):
        whole = held.codec == "e4m3" and held.group == (1, held.shape[2]) and held.scales.dtype == torch.float32
        if not whole or held.x_group is None or held.x_scale is not None or held.order is not None:
            return False
        if held.x_group < held.shape[2] and held.x_group != _LINE:
            return False
    outputs, inputs = held.shape[1:]
    fits = not outputs % 128 and not inputs * codes.itemsize % _LINE and not codes.data_ptr() % 16
    return fits and codes.dtype in _KINDS and not refusals(codes.device)


def product(
    x: torch.Tensor, x_scales: torch.Tensor, routing: Routing, held: torch.Tensor | ExpertCodes, factors: torch.Tensor | None,
    top_k: int, dtype: torch.dtype, sizes: BlockSizes | None = None
) -> torch.Tensor:  # fmt: skip
    """One of the two products, for what the kernel ``takes``.

    Args:
        x: rows of tokens for the first product, by place for the second.
        x_scales: ``[groups, rows]`` of e4m3.
        factors: ``[T, top_k]``, of the second product; None: it is the first, with silu of the gate.
        dtype: of the result.

    Returns:
        ``[choices, inner]`` by place, or ``[choices, hidden]`` by choice.
    """
    first, codes = factors is None, held if isinstance(held, torch.Tensor) else held.codes
    rows = routing.table_tokens if routing.in_order else _FEWEST
    sizes = sizes or (FIRST if first else SECOND)
    count, height, inputs = held.shape
    out = height // 2 if first else height
    y = torch.empty(routing.choices, out, dtype=dtype, device=x.device)
    columns = _LINE // codes.itemsize
    scales = held.scales.data_ptr() if isinstance(held, ExpertCodes) else 0
    groups = cdiv(inputs, held.x_group) if isinstance(held, ExpertCodes) and held.x_group else 1
    kernel = _kernel(first, routing.in_order, _KINDS[codes.dtype], dtype, rows, sizes, top_k, count, groups)
    outputs = sizes.lines // 2 if first else sizes.lines
    tiles, table = routing.tiles(rows), routing.table
    kernel.launch(
        (tiles * cdiv(out, outputs), 1, 1), tensor_map(codes.view(-1, inputs), outputs, columns),
        tensor_map(x, 1 if first else rows, columns), 0 if table is None else table.data_ptr(), routing.order.data_ptr(),
        x_scales.data_ptr(), scales, 0 if factors is None else factors.data_ptr(), y.data_ptr(), tiles, out,
        cdiv(inputs, columns), x_scales.stride(0),
    )  # fmt: skip
    return y


@functools.cache
def _kernel(
    first: bool,
    tabled: bool,
    kind: int,
    dtype: torch.dtype,
    rows: int,
    sizes: BlockSizes,
    top_k: int,
    experts: int,
    groups: int,
) -> CudaKernel:
    macros = {"FIRST": int(first), "KIND": kind, "ROWS": rows, "LINES": sizes.lines, "STAGES": sizes.stages(rows)}
    macros |= {"TABLED": int(tabled), "Y_KIND": _KINDS[dtype], "TOP_K": top_k, "EXPERTS": experts, "GROUPS": groups}
    return CudaKernel(_SOURCE, "expert_product", "MMPPPPPPiiii", macros, _THREADS, sizes.shared(rows))
